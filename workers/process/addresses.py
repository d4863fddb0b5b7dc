"""Decides which hosts and addresses this process may fetch files from and send events to. Pure.

A gateway stands inside a network that its callers are not in: a URL must not become a way to what listens there.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

NAT64 = ip_network("64:ff9b::/96")
"""Prefix of addresses that end in an IPv4 address, which a gateway of the network reaches (RFC 6052)."""
LOCAL_NAT64 = ip_network("64:ff9b:1::/48")
"""The same for prefixes that a network makes for itself (RFC 8215); only the network knows how long they are."""
COMPATIBLE = ip_network("::/96")
"""Deprecated addresses that end in an IPv4 address (RFC 4291)."""
USUAL_PORTS = (80, 443)
CGNAT = ip_network("100.64.0.0/10")
METADATA = (
    ip_network("169.254.0.0/16"),
    ip_network("fd00:ec2::/32"),
    ip_network("100.100.100.200/32"),
    ip_network("192.0.0.192/32"),
    ip_network("168.63.129.16/32"),
    ip_network("fd20:ce::254/128"),
)
"""Where clouds answer their own machines, credentials included; never allowed. Most are link-local, some are not."""

Address = IPv4Address | IPv6Address


def is_listed(host: str, allowed: Sequence[str], port: int = 443) -> bool:
    """Return whether a host is one of `allowed`: names, or `*.example.com` for all names below example.com. At ports
    other than 80 and 443 it is only if they are named: `example.com:8080`, or `example.com:*` for all."""
    name = _plain(host)
    for one in allowed:
        written, ports = _with_ports(one)
        if ports is not None and port not in ports:
            continue
        wanted = _plain(written)
        if wanted.startswith("*."):
            if name.endswith(wanted[1:]) and len(name) > len(wanted) - 1:
                return True
        elif name == wanted:
            return True
    return False


def why_refused(address: str, *, allow_private: bool) -> str:
    """Return why nothing may be fetched from a numeric address; empty: it may. `allow_private`: networks of the
    operator's own and this machine are allowed."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return "no address"
    return next((why for one in _meant(found) if (why := _refusal(one, allow_private=allow_private))), "")


def _with_ports(entry: str) -> tuple[str, tuple[int, ...] | None]:
    """Return the host of an entry, and the ports at which it is listed; None: all."""
    host, colon, port = entry.strip().rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):  # the second: an IPv6 address without a port
        return entry, USUAL_PORTS
    if port == "*":
        return host, None
    return (host, (int(port),)) if port.isdigit() else (entry, USUAL_PORTS)


def _plain(host: str) -> str:
    return host.strip().lower().rstrip(".").strip("[]")


def _meant(address: Address) -> list[Address]:
    """Return the address, and the IPv4 addresses that packets to it reach in the end."""
    if isinstance(address, IPv4Address):
        return [address]
    last = IPv4Address(int(address) & 0xFFFF_FFFF)
    meant: list[Address] = [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address.sixtofour is not None:
        meant.append(address.sixtofour)
    if address.teredo is not None:
        meant += address.teredo
    if address in NAT64:
        return [last]
    if address in LOCAL_NAT64:
        return _behind_nat64(address.packed)
    if address in COMPATIBLE and int(address) > 1:
        meant.append(last)
    return meant


def _behind_nat64(packed: bytes) -> list[Address]:
    """Return the IPv4 addresses in an address, one for each length that its prefix can have (RFC 6052, 2.2)."""
    found = (packed[6:8] + packed[9:11], packed[7:8] + packed[9:12], packed[9:13], packed[12:])
    return [IPv4Address(one) for one in found if one[0]] or [IPv4Address(0)]


def _refusal(address: Address, *, allow_private: bool) -> str:
    if any(address in network for network in METADATA if network.version == address.version):
        return "link-local, or one at which a cloud answers its own machines"
    if address.is_link_local:
        return "link-local"
    if address.is_multicast:
        return "multicast"
    if address.is_unspecified:
        return "unspecified"
    if address.is_loopback:
        return "" if allow_private else "this machine's own"
    if address in CGNAT if address.version == CGNAT.version else False:
        return "" if allow_private else "of a network that is shared behind a NAT"
    if _is_own(address):
        return "" if allow_private else "private"
    if address.is_reserved or not address.is_global:
        return "reserved"
    return ""


_OWN = tuple(map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fec0::/10")))


def _is_own(address: Address) -> bool:
    return any(address in network for network in _OWN if network.version == address.version)
