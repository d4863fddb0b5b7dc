"""A network between two processes that a test holds in its hands: cut, stalled, slow, or led to another server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

CHUNK_BYTES = 65536


@dataclass(eq=False, slots=True)
class _Connection:
    ends: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    head: bytes = b""
    """What the client sent first."""


@dataclass(slots=True)
class Wire:
    """A TCP proxy on this event loop. Open one with `open_wire`."""

    target: tuple[str, int]
    """New connections lead there."""
    port: int = 0
    num_cut: int = 0
    delay_s: float = 0.0
    """What is on its way takes so long in each direction: half of a round trip."""
    _flows: asyncio.Event = field(default_factory=asyncio.Event)
    _connections: set[_Connection] = field(default_factory=set)
    _serving: set[asyncio.Task[None]] = field(default_factory=set)

    def cut(self, *, only: bytes = b"") -> int:
        """Drops the connections whose first bytes contain `only`; how many that were."""
        struck = [connection for connection in self._connections if only in connection.head]
        for connection in struck:
            self._connections.discard(connection)
            for end in connection.ends:
                end.transport.abort()
        self.num_cut += len(struck)
        return len(struck)

    def stall(self) -> None:
        """Connections stay open and can be made; nothing passes."""
        self._flows.clear()

    def go_on(self) -> None:
        self._flows.set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def close(self) -> None:
        self.go_on()
        self.cut()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(*self.target)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection((writer, back))
        self._connections.add(connection)
        try:
            await asyncio.gather(self._pump(reader, back, connection), self._pump(there, writer, None))
        finally:
            self._connections.discard(connection)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, asks: _Connection | None) -> None:
        on_its_way = asyncio.Queue[tuple[float, bytes]]()
        delivering = asyncio.create_task(self._deliver(on_its_way, sink))
        loop, arrives_at = asyncio.get_running_loop(), 0.0
        data = b"?"
        while data:
            try:
                data = await source.read(CHUNK_BYTES)
            except OSError:
                data = b""
            if asks is not None and not asks.head:
                asks.head = data
            arrives_at = max(arrives_at, loop.time() + self.delay_s)  # nothing overtakes what was sent before
            on_its_way.put_nowait((arrives_at, data))
            if not self.delay_s:
                await on_its_way.join()  # a reader that does not read holds the writer up
        await delivering

    async def _deliver(self, on_its_way: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
        """What was sent, in its order, each when it arrives; empty data is the end."""
        loop, data = asyncio.get_running_loop(), b"?"
        while data:
            arrives_at, data = await on_its_way.get()
            if (left_s := arrives_at - loop.time()) > 0:
                await asyncio.sleep(left_s)
            await self._flows.wait()
            with suppress(OSError):
                sink.write(data)
                await sink.drain()
            on_its_way.task_done()
        sink.close()


@asynccontextmanager
async def open_wire(port: int, host: str = "127.0.0.1") -> AsyncIterator[Wire]:
    """To a server there."""
    wire = Wire((host, port))
    wire.go_on()
    server = await asyncio.start_server(wire.accept, "127.0.0.1", 0)
    wire.port = server.sockets[0].getsockname()[1]
    try:
        yield wire
    finally:
        server.close()
        await wire.close()
