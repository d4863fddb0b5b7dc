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
    told = b"ok"
    if scope["path"] == "/slow":
        await asyncio.sleep(PAUSE_S)
    if scope["path"] == "/headers":
        while (await receive()).get("more_body"):
            pass
        told = b"%d headers" % len(scope["headers"])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(told))]})
    await send({"type": "http.response.body", "body": told})


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(handshake, "HEAD_S", PAUSE_S / 2)
    config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_keep_alive=1)
    state = ServerState()
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


async def test_a_body_before_it_does_not_count_as_a_head(port: int) -> None:
    body = b"x" * (2 * MAX_HEAD_BYTES)
    first = b"POST /slow HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body)
    answer = await said(port, first, body + b"GET / HT", b"TP/1.1\r\nconnection: close\r\n\r\n", pause_s=0.02)
    assert answer.count(b"HTTP/1.1 200 ") == 2


async def test_what_is_no_request_keeps_no_connection(port: int) -> None:
    began = asyncio.get_running_loop().time()
    answer = await said(port, b"GET / HTTP/1.1\r\n\r\n", b"\r\n", pause_s=0.1)
    assert answer.count(b"HTTP/1.1 200 ") == 1
    assert asyncio.get_running_loop().time() - began < 3, "it ends as an idle one does"


async def test_trailers_are_not_kept(port: int) -> None:
    head = b"POST /headers HTTP/1.1\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n0\r\n"
    answer = await said(port, head + b"a: b\r\n" * 1000 + b"\r\n")
    assert answer.endswith(b"2 headers")
