"""A request's body is read as its body, whatever protocol its `upgrade` header names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.unit.workers.http_server.test_protocol import listening, said
from workers.http_server.connection import CHUNK

BODY = b"GET /smuggled HTTP/1.1\r\nconnection: close\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nconnection: close\r\n\r\n"
WEBSOCKET = b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"

SEEN: list[tuple[str, str, bytes]] = []
"""The method, path and body of each request that reached the application."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Record the request, and answer once all of its body has come."""
    body, more = b"", True
    while more and (event := await receive())["type"] == "http.request":
        body, more = body + event["body"], event["more_body"]
    SEEN.append((scope["method"], scope["path"], body))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    SEEN.clear()
    async with listening(5, app) as there:
        yield there


def framed(form: str, body: bytes = BODY) -> tuple[bytes, bytes]:
    """Return the header that tells of a body, and the body as it is sent."""
    if form == "length":
        return b"content-length: %d\r\n" % len(body), body
    return b"transfer-encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def divided(sent: bytes, head_bytes: int, how: str) -> list[bytes]:
    if how == "whole":
        return [sent]
    if how == "two":
        return [sent[:head_bytes], sent[head_bytes:]]
    return [sent[place : place + 1] for place in range(len(sent))]


@pytest.mark.parametrize("how", ["whole", "two", "bytes"])
@pytest.mark.parametrize("form", ["length", "chunked"])
@pytest.mark.parametrize("method", [b"POST", b"GET"])
@pytest.mark.parametrize(
    ("connection", "upgrade"),
    [
        (b"Upgrade", b"h2c"),
        (b"Upgrade, HTTP2-Settings", b"h2c"),
        (b"keep-alive, Upgrade", b"foo"),
        (b"upgrade", b"TLS/1.3"),
        (b"Upgrade", b"websocket, h2c"),
    ],
)
async def test_an_upgrade_to_another_protocol_leaves_the_body_a_body(
    port: int, method: bytes, connection: bytes, upgrade: bytes, form: str, how: str
) -> None:
    """The parser takes such a request to end with its head, and the body ran as a request of its own."""
    header, body = framed(form)
    head = b"%b /first HTTP/1.1\r\nx-empty:\r\nConnection: %b\r\nUPGRADE: %b\r\n" % (method, connection, upgrade)
    head += header + b"\r\n"
    answer = await said(port, *divided(head + body + LAST, len(head), how), pause_s=0.0 if how == "whole" else 0.001)
    assert [(method.decode(), "/first", BODY), ("GET", "/last", b"")] == SEEN
    assert answer.count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize("form", ["length", "chunked"])
@pytest.mark.parametrize("how", ["whole", "two", "bytes"])
async def test_only_a_get_begins_a_websocket(port: int, form: str, how: str) -> None:
    header, body = framed(form)
    head = b"POST /first HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n" + WEBSOCKET + header + b"\r\n"
    await said(port, *divided(head + body + LAST, len(head), how), pause_s=0.0 if how == "whole" else 0.001)
    assert SEEN == [("POST", "/first", BODY), ("GET", "/last", b"")]


@pytest.mark.parametrize("form", ["length", "chunked"])
@pytest.mark.parametrize("how", ["whole", "two", "bytes"])
async def test_a_handshake_of_a_websocket_with_a_body_is_refused(port: int, form: str, how: str) -> None:
    header, body = framed(form)
    head = b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n" + WEBSOCKET + header + b"\r\n"
    answer = await said(port, *divided(head + body + LAST, len(head), how), pause_s=0.0 if how == "whole" else 0.001)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"The handshake of a WebSocket has a body" in answer
    assert SEEN == []


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_an_upgrade_of_a_connection_that_is_to_close(port: int, version: bytes) -> None:
    head = b"POST / HTTP/%b\r\nconnection: close, upgrade\r\nupgrade: h2c\r\ncontent-length: 5\r\n\r\n" % version
    answer = await said(port, head, b"hello" + LAST, pause_s=0.02)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.endswith(b"ok")
    assert SEEN == [("POST", "/", b"hello")]


async def test_an_upgrade_without_a_body(port: int) -> None:
    asks = b"GET /first HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    answer = await said(port, asks + asks + LAST)
    assert answer.count(b"HTTP/1.1 200 ") == 3
    assert [path for _, path, _ in SEEN] == ["/first", "/first", "/last"]


@pytest.mark.parametrize("form", ["length", "chunked"])
async def test_an_upgrade_behind_the_chunks_of_an_earlier_body(port: int, form: str) -> None:
    """Its head may be parsed together with those chunks."""
    first = b"POST /first HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
    header, body = framed(form)
    second = b"POST /second HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n" + header + b"\r\n" + body
    answer = await said(port, first, b"1\r\nx\r\n0\r\n\r\n" + second + LAST, pause_s=0.02)
    assert SEEN == [("POST", "/first", b"x"), ("POST", "/second", BODY), ("GET", "/last", b"")]
    assert answer.count(b"HTTP/1.1 200 ") == 3


async def test_the_request_of_javas_client_is_served(port: int) -> None:
    """Its `HttpClient` asks every address for HTTP/2 first, unless it is told not to."""
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: 2\r\n"
        b"Host: 127.0.0.1:8080\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n"
        b"User-Agent: Java-http-client/17\r\nContent-Type: application/json\r\n\r\n"
    )
    answer = await said(port, head, b"{}", head, b"{}" + LAST, pause_s=0.02)
    assert SEEN == [("POST", "/v1/chat/completions", b"{}")] * 2 + [("GET", "/last", b"")]
    assert answer.count(b"HTTP/1.1 200 ") == 3


@pytest.mark.parametrize("target", [b"/first", b"http://x/first", b"x:443"])
async def test_a_tunnel_is_refused(port: int, target: bytes) -> None:
    """The parser takes this to have no body either."""
    head = b"CONNECT %b HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (target, len(BODY))
    answer = await said(port, head + BODY + LAST)
    assert answer.startswith(b"HTTP/1.1 501 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert SEEN == []


@pytest.mark.parametrize(
    ("coding", "status"),
    [
        (b"gzip", 400),
        (b"identity", 400),
        (b"chunked;a=b", 400),
        (b"gzip, chunked", 501),
        (b"gzip\r\ntransfer-encoding: Chunked", 501),
        (b"Chunked", 200),
    ],
)
async def test_bodies_in_other_codings_are_refused(port: int, coding: bytes, status: int) -> None:
    """The application took a compressed body for JSON, or heard of a request that had no answer."""
    head = b"POST / HTTP/1.1\r\ntransfer-encoding: %b\r\nconnection: close\r\n\r\n" % coding
    answer = await said(port, head + b"1\r\nx\r\n0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert ([("POST", "/", b"x")] if status == 200 else []) == SEEN


async def test_a_request_of_another_version_is_refused(port: int) -> None:
    answer = await said(port, b"GET / HTTP/2.0\r\nconnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 505 ")
    assert b"Send HTTP/1.1 or 1.0." in answer
    assert SEEN == []


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_only_newer_clients_are_told_to_continue(port: int, version: bytes) -> None:
    head = b"POST / HTTP/%b\r\nexpect: 100-continue\r\ncontent-length: 1\r\nconnection: close\r\n\r\n" % version
    answer = await said(port, head, b"x", pause_s=0.05)
    assert answer.startswith(b"HTTP/1.1 200 " if version == b"1.0" else b"HTTP/1.1 100 ")
    assert answer.endswith(b"ok")


@pytest.mark.parametrize("app_writes", ["at the end", "never", "chunks"])
@pytest.mark.parametrize(
    "chunk", [b"-5\r\nhello", b"FFFFFFFFFFFFFFFFFF\r\n", b"0x5\r\nhello\r\n", b"5\nhello\n", b"5\r\nhelloXX0\r\n\r\n"]
)
async def test_a_malformed_chunk_is_told(chunk: bytes, app_writes: str) -> None:
    """What the application writes for such a request comes too late, and must not follow the refusal."""
    events: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (event := await receive())["type"] == "http.request":
            assert event["more_body"]
            events.append(event["type"])
        events.append(event["type"])
        if app_writes != "never":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            if app_writes == "chunks":
                scope["extensions"][CHUNK]["write"](b"late")
            await send({"type": "http.response.body", "body": b"late"})

    head = b"POST / HTTP/1.1\r\nexpect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n"
    async with listening(5, app) as port:
        for parts in ((head, chunk + LAST), (head + chunk + LAST,)):
            answer = (await said(port, *parts, pause_s=0.05)).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert answer.endswith(b"CRLF behind both.")
            assert answer.count(b"HTTP/1.1 ") == 1
            assert events.pop() == "http.disconnect"


async def test_a_malformed_chunk_of_an_answered_request_is_not_answered_again() -> None:
    """A peer would take a second answer for that to its next request."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        if scope["path"] == "/later":
            await asyncio.sleep(0.1)
        await send({"type": "http.response.body", "body": b"ok"})

    async with listening(5, app) as port:
        for path, end in ((b"/", b"ok"), (b"/later", b"\r\n\r\n")):
            head = b"POST %b HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" % path
            answer = await said(port, head, b"-5\r\n", pause_s=0.05)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert answer.endswith(end)
            assert answer.count(b"HTTP/1.1 ") == 1


async def test_a_malformed_chunk_behind_an_unanswered_request_ends_the_connection() -> None:
    """A refusal would be taken for the answer to the earlier request."""
    first = b"POST /slow HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
    second = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
    async with listening(5) as port:
        assert await said(port, first, b"1\r\nx\r\n0\r\n\r\n" + second + b"-5\r\n", pause_s=0.02) == b""
