"""Tells aiohttp's clients the addresses of the hosts that they connect to, so that names are looked up beside the event
loop's own threads (`workers.process.resolver`), or an address is checked before anything is sent to it.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Sequence

from aiohttp.abc import AbstractResolver, ResolveResult

Addresses = Callable[[str], Awaitable[Sequence[str]]]
"""Returns the numeric addresses of a host. Raises OSError if it has none, or none that may be used."""


class ResolverOf(AbstractResolver):
    """Resolves hosts by a function. Use it with `use_dns_cache=False`: the function is asked for each connection."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_INET) -> list[ResolveResult]:
        """Return all addresses, of both families. Raises OSError."""
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in await self._addresses(host)
        ]

    async def close(self) -> None:
        """Do nothing: it holds nothing."""
