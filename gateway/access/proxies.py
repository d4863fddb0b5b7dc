"""Networks, and the caller's address and scheme: the connection's or, behind trusted proxies, what those tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address, ip_network

from starlette.types import Scope

Network = IPv4Network | IPv6Network

UNIX = "unix"
"""Stands among the trusted proxies for whoever connects by the Unix socket."""
FORWARDED_FOR, FORWARDED_PROTO = b"x-forwarded-for", b"x-forwarded-proto"
MAX_HOPS = 32
"""Maximum number of addresses that are looked at, from the last one on."""


class ProxiesInvalid(ValueError):
    """The setting `trusted_proxies` can't be used; the message says why."""


class TrustedProxies:
    """The proxies whose headers about a caller are believed. Those of others are not: every caller can send them."""

    def __init__(self, networks: tuple[Network, ...] = (), *, by_unix_socket: bool = False) -> None:
        self._networks = networks
        self._by_unix_socket = by_unix_socket

    def address_of(self, scope: Scope) -> str:
        """Return the caller's address; empty if it comes by a Unix socket, and no trusted proxy tells another.

        Behind trusted proxies it is the last address in `x-forwarded-for` that is no trusted proxy's: each proxy adds
        the one that it was called from, and what stands before that a caller may have sent."""
        address: str = scope["client"][0] if scope.get("client") else ""
        if not self._trusts(address):
            return address
        for hop in _hops(scope):
            if not hop:
                break  # no address: what stands before it proves nothing either
            address = hop
            if not is_in(hop, self._networks):
                break
        return address

    def scheme_of(self, scope: Scope) -> str:
        """Return `http` or `https`, as the caller sent the request."""
        own = "https" if scope["scheme"] in ("https", "wss") else "http"
        peer = scope["client"][0] if scope.get("client") else ""
        if not self._trusts(peer):
            return own
        told = [value.strip().lower() for name, value in scope["headers"] if name == FORWARDED_PROTO]
        return told[-1].decode() if told and told[-1] in (b"http", b"https") else own

    def _trusts(self, peer: str) -> bool:
        return is_in(peer, self._networks) if peer else self._by_unix_socket


def trusted_proxies(setting: str) -> TrustedProxies:
    """Return the proxies of the setting: CIDRs, or `unix`, with commas between them. Raises ProxiesInvalid."""
    words = [word for word in map(str.strip, setting.split(",")) if word]
    try:
        networks = networks_of(word for word in words if word != UNIX)
    except ValueError as error:
        raise ProxiesInvalid(
            f"trusted_proxies: {error}; give networks such as `10.0.0.0/8`, or `{UNIX}`, with commas between them"
        ) from None
    return TrustedProxies(networks, by_unix_socket=UNIX in words)


def _hops(scope: Scope) -> Iterator[str]:
    """Yield the addresses in `x-forwarded-for` from the last on, without ports; empty for what is no address."""
    value = b",".join(value for name, value in scope["headers"] if name == FORWARDED_FOR)
    if not value:
        return
    for hop in reversed(value.rsplit(b",", MAX_HOPS)[-MAX_HOPS:]):
        text = hop.strip().decode("latin-1")
        host = text[1:].partition("]")[0] if text.startswith("[") else text
        if host.count(":") == 1:
            host = host.partition(":")[0]
        try:
            yield str(ip_address(host.partition("%")[0]))
        except ValueError:
            yield ""


def networks_of(texts: Iterable[str]) -> tuple[Network, ...]:
    """Return networks from their CIDRs or addresses. Raises ValueError."""
    return tuple(ip_network(text, strict=False) for text in texts)


def is_in(address: str, networks: Iterable[Network]) -> bool:
    """Return whether an address lies in one of the networks. One of IPv4 in IPv6's form counts as IPv4."""
    try:
        given = ip_address(address.partition("%")[0])
    except ValueError:
        return False  # that of a Unix socket is empty
    found = given if isinstance(given, IPv4Address) else given.ipv4_mapped or given
    return any(found in network for network in networks)
