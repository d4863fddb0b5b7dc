"""A peer that reads slowly is waited for; one that reads nothing is cut off."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from workers.http_server.connection import UnreadTimer

PATIENCE_S = 0.2
ANSWER_BYTES = 1 << 20


class Writer(asyncio.Protocol):
    """Writes one large answer as soon as somebody connects."""

    def __init__(self) -> None:
        self._timer = UnreadTimer(asyncio.get_running_loop(), PATIENCE_S)
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        transport.write(bytes(ANSWER_BYTES))
        transport.close()

    def pause_writing(self) -> None:
        self._timer.full(self.transport)

    def resume_writing(self) -> None:
        self._timer.read()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.read()


@asynccontextmanager
async def reader() -> AsyncIterator[socket.socket]:
    """Open a connection with small buffers to a `Writer`."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Writer, "127.0.0.1", 0)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, server.sockets[0].getsockname())
        yield client
    server.close()
    await server.wait_closed()


async def num_read(client: socket.socket, pause_s: float) -> int:
    """Read to the end, a piece at a time; returns the bytes that came."""
    total = 0
    while True:
        try:
            piece = await asyncio.get_running_loop().sock_recv(client, 1 << 18)
        except ConnectionResetError:
            return total
        if not piece:
            return total
        total += len(piece)
        await asyncio.sleep(pause_s)


async def test_who_reads_slowly_gets_the_whole_answer() -> None:
    async with reader() as client:
        began = asyncio.get_running_loop().time()
        assert await num_read(client, 0.005) == ANSWER_BYTES
        assert asyncio.get_running_loop().time() - began > 2 * PATIENCE_S


async def test_who_reads_nothing_is_cut_off() -> None:
    async with reader() as client:
        await asyncio.sleep(4 * PATIENCE_S)
        assert await num_read(client, 0.0) < ANSWER_BYTES
