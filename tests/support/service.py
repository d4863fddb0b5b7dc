"""A stand-in for a Service of Kubernetes: one address, and behind it whoever says that it is ready.

Connections are passed on byte by byte and never tried again elsewhere: what an endpoint refuses or breaks, the caller
sees. Endpoints come and go some time after their `/ready` has changed, as they do where many nodes must hear of it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp

PROBE_S = 0.1
"""Between two looks at `/ready`."""
SPREAD_S = 0.3
"""From a look to the last node that knows what came of it."""
PIECE = 1 << 16


@dataclass(slots=True)
class Service:
    """Open one with `serving`."""

    ready: dict[str, None] = field(default_factory=dict)
    """Endpoints that new connections go to, by URL."""
    refused: int = 0
    """Connections that an endpoint did not take, or that there was none for."""
    url: str = ""
    _probes: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _turns: itertools.count[int] = field(default_factory=itertools.count)

    def add(self, url: str) -> None:
        """An endpoint, from now on looked at; it need not be there yet."""
        self._probes[url] = asyncio.create_task(self._probe(url))

    async def until_ready(self, url: str, timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while url not in self.ready:  # noqa: ASYNC110 - a test may poll
                await asyncio.sleep(0.02)

    async def remove(self, url: str) -> None:
        """It is not there any more."""
        probe = self._probes.pop(url)
        probe.cancel()
        await asyncio.wait([probe])
        self.ready.pop(url, None)

    async def close(self) -> None:
        for url in list(self._probes):
            await self.remove(url)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection from its beginning to its end."""
        endpoints = list(self.ready)
        try:
            if not endpoints:
                raise ConnectionRefusedError
            place = urlsplit(endpoints[next(self._turns) % len(endpoints)])
            there, back = await asyncio.open_connection(place.hostname, place.port)
        except OSError:
            self.refused += 1
            writer.transport.abort()
            return
        await asyncio.gather(_pass_on(reader, back), _pass_on(there, writer))

    async def _probe(self, url: str) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                now = await _is_ready(session, url)
                if now != (url in self.ready):
                    await asyncio.sleep(SPREAD_S)
                    if now:
                        self.ready[url] = None
                    else:
                        self.ready.pop(url, None)
                await asyncio.sleep(PROBE_S)


@asynccontextmanager
async def serving() -> AsyncIterator[Service]:
    service = Service()
    server = await asyncio.start_server(service.connected, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    service.url = f"http://{host}:{port}"
    try:
        yield service
    finally:
        server.close()
        await service.close()


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/ready", timeout=aiohttp.ClientTimeout(total=1.0)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until either side ends it; the other side is told in the same way."""
    try:
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()
    except OSError:
        writer.transport.abort()
    finally:
        with suppress(OSError):
            writer.close()
