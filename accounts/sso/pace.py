"""Bounds how many requests of one address, and of all, come in a minute: sign-ins need no key, and each costs a write
to the database or a request to the identity provider.
"""

from __future__ import annotations

import ipaddress
import time
from collections import Counter

from accounts.errors import TooManySignIns

MINUTE_S = 60.0
IPV6_BITS = 64
"""Bits of an IPv6 address that tell callers apart: one of them has all addresses below."""
MAX_ADDRESSES = 100_000
"""Maximum number of addresses that are counted in one minute; after that, all further ones count as one."""


class Pace:
    """Counts requests by address and minute."""

    def __init__(self, per_address: int, in_all: int) -> None:
        """`per_address`, `in_all`: maximum requests per minute."""
        self._per_address = per_address
        self._in_all = in_all
        self._counts: Counter[str] = Counter()
        self._until = 0.0

    def take(self, address: str) -> None:
        """Count a request. Raises TooManySignIns if there are too many in this minute."""
        now = time.monotonic()
        if now >= self._until:
            self._counts.clear()
            self._until = now + MINUTE_S
        whose = _network(address)
        if whose not in self._counts and len(self._counts) >= MAX_ADDRESSES:
            whose = ""
        if self._counts[whose] >= self._per_address:
            raise TooManySignIns(
                f"Your address has sent {self._per_address} requests for signing in within a minute. Wait a minute.",
                retry_after_s=self._until - now,
            )
        if self._counts.total() >= self._in_all:
            raise TooManySignIns(
                f"There were {self._in_all} requests for signing in within a minute. Wait a minute.",
                retry_after_s=self._until - now,
            )
        self._counts[whose] += 1


def _network(address: str) -> str:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found), IPV6_BITS), strict=False))
