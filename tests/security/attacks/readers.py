"""Attacks by peers who send as little as they can, or read nothing of what they are answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator
from urllib.parse import urlsplit

from tests.security.attack import Attack, Target

REFUSED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
ONE_BYTE, NUM_CHUNKS = b"1\r\nx\r\n", 200_000
NUM_DEAF = 280
HELD_S = 2.0
NUM_SLOW, SLOW_S, SLOW_BYTES = 48, 8, 1100
"""Readers of many probabilities, for how many seconds they read, and the bytes that each reads in a second."""
GIVES_UP_S = 5.0


@contextlib.asynccontextmanager
async def _deaf(target: Target, sent: bytes) -> AsyncGenerator[socket.socket]:
    """Open a connection that sends this, as far as it is taken, and reads nothing by itself."""
    address, loop = urlsplit(target.url), asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        async with asyncio.timeout(GIVES_UP_S):
            await loop.sock_connect(connection, (address.hostname, address.port))
            await loop.sock_sendall(connection, sent)
        yield connection


async def _one_byte_chunks(target: Target) -> None:
    async with _deaf(target, REFUSED + ONE_BYTE * NUM_CHUNKS):
        await asyncio.sleep(0.1)


async def _deaf_probes(target: Target) -> None:
    async with contextlib.AsyncExitStack() as held:
        for _ in range(NUM_DEAF):
            with contextlib.suppress(OSError, TimeoutError):  # refused
                await held.enter_async_context(_deaf(target, b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 8))
        await asyncio.sleep(HELD_S)


async def _slow_probabilities(target: Target) -> None:
    body = {"model": target.model, "prompt": "a", "n_predict": 1000, "n_probs": 100, "ignore_eos": True, "stream": True}
    text = json.dumps(body).encode()
    head = f"POST /completion HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {target.attacker_key}\r\n"
    request = f"{head}content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n".encode() + text
    async with contextlib.AsyncExitStack() as held:
        readers: list[socket.socket] = []
        for _ in range(NUM_SLOW):
            with contextlib.suppress(OSError, TimeoutError):  # refused
                readers.append(await held.enter_async_context(_deaf(target, request)))
        for _ in range(SLOW_S):
            await asyncio.sleep(1.0)
            for reader in readers:
                with contextlib.suppress(OSError):  # nothing has come, or the connection was ended
                    reader.recv(SLOW_BYTES)


ATTACKS = (
    Attack(
        name="one-byte-chunks",
        about="Bodies in chunks of one byte behind a 401: three held the event loop for 865 ms.",
        strike=_one_byte_chunks,
        at_once=3,
    ),
    Attack(
        name="deaf-probes",
        about="280 connections without a key ask for /metrics and read nothing; beyond the bound none else came in.",
        strike=_deaf_probes,
    ),
    Attack(
        name="slow-probabilities",
        about="Answers with a hundred probabilities for each token are read at 1 KiB a second: 520 MiB, and kept.",
        strike=_slow_probabilities,
        short_s=2.5,
    ),
)
