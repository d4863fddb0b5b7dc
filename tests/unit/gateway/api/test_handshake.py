"""Heads of requests are bounded in size and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from gateway.api import handshake
from gateway.api.handshake import MAX_HEAD_BYTES, HttpProtocol

PAUSE_S = 0.3


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] == "/slow":
        await asyncio.sleep(PAUSE_S)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(handshake, "HEAD_S", PAUSE_S / 2)
    config, state = uvicorn.Config(app, lifespan="off", log_config=None), ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: HttpProtocol(config, state, {}), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def said(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """All that is answered, until the connection ends; it does by itself where a head is refused."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(5):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_a_sound_head_is_answered(port: int) -> None:
    assert (await said(port, b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")).endswith(b"ok")
    parts = b"GET / HTTP/1.1\r\n", b"connection: close\r\n", b"\r\n"
    assert (await said(port, *parts, pause_s=0.01)).endswith(b"ok")


@pytest.mark.parametrize("head", [b"GET /%b", b"GET / HTTP/1.1\r\nx: %b", b"GET / HTTP/1.1\r\n%b: "])
async def test_a_head_without_end_is_refused(port: int, head: bytes) -> None:
    chunk = b"x" * (MAX_HEAD_BYTES // 4)
    answer = await said(port, head % chunk, *[chunk] * 4, pause_s=0.02)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"The head of the request has more than 64 KiB. Send fewer and shorter headers." in answer


async def test_a_head_that_does_not_come_is_not_waited_for(port: int) -> None:
    answer = await said(port, b"GET / HTTP/1.1\r\nx: 1\r\n")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert await said(port) == b"", "who says nothing is told nothing"
    kept = b"GET / HTTP/1.1\r\n\r\n", b"GET /"
    answer = await said(port, *kept, pause_s=0.02)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in answer


async def test_an_answer_under_way_is_not_cut_for_the_next_head(port: int) -> None:
    answer = await said(
        port, b"GET /slow HTTP/1.1\r\n\r\nGET / HT", b"TP/1.1\r\nconnection: close\r\n\r\n", pause_s=PAUSE_S
    )
    assert answer.count(b"HTTP/1.1 200 ") == 2
