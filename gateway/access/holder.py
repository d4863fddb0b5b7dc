"""The holder of an API key: who it is, and where and until when the key may be used."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address, ip_network

from accounts.protocol.records import AccessRecord
from gateway.call import Principal
from gateway.errors import KeyExpired, NetworkNotAllowed

Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class Holder:
    """A key's principal, and the conditions on which it may call."""

    principal: Principal
    is_conditional: bool = False
    """Whether there is a condition at all."""
    valid_until: float = math.inf
    """Unix time."""
    is_replaced: bool = False
    """Whether the key is the one before a rotation, valid only for a while."""
    networks: tuple[Network, ...] = ()
    """Networks from which the key may be used; empty: all."""

    def check(self, address_of: Callable[[], str], now: float) -> None:
        """Raise KeyExpired or NetworkNotAllowed if a condition is not met. `now`: unix time."""
        if now > self.valid_until:
            raise KeyExpired(self._expired())
        if self.networks and not is_in(address := address_of(), self.networks):
            raise NetworkNotAllowed(
                f"This API key may not be used from {address or 'a Unix socket'}. Call from a network that it is for, "
                "or have yours added to the key's `networks`."
            )

    def _expired(self) -> str:
        if self.is_replaced:
            return f"This API key was replaced, and was valid until {_shown(self.valid_until)}. Use the new one."
        return f"This API key expired on {_shown(self.valid_until)}. Ask for a new one."


def make_holder(record: AccessRecord, sha256: str, principal: Principal) -> Holder:
    """Return the holder of a key. `sha256`: the key's hash, that of the record or the one before a rotation."""
    valid_until = math.inf if record.expires_at is None else record.expires_at
    is_replaced = sha256 != record.sha256 and record.previous_until < valid_until
    if is_replaced:
        valid_until = record.previous_until
    is_conditional = bool(record.networks) or valid_until < math.inf
    return Holder(principal, is_conditional, valid_until, is_replaced, networks_of(record.networks))


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


def _shown(at: float) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{at:g} (unix time)"
