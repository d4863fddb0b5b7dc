"""Heads of requests are bounded in size, number and time; what is sent ahead waits as bytes, and not much of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
import time
import tracemalloc
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.support.waiting import until
from workers.http_server import protocol
from workers.http_server.connection import CHUNK
from workers.http_server.connections import ConnectionBounds, Connections
from workers.http_server.pacer import FIRST_MOST, KnownCallers
from workers.http_server.protocol import MAX_HEAD_BYTES, MAX_HEADERS, MAX_PIPELINED, HttpProtocol
from workers.http_server.state import Refusal, ServerState

PAUSE_S = 0.3
TINY = b"GET / HTTP/1.1\r\n\r\n"


def form(refusal: Refusal) -> bytes:
    return refusal.message.encode()


async def app(scope: Any, receive: Any, send: Any) -> None:
    told = b"ok"
    if scope["path"] == "/slow":
        await asyncio.sleep(PAUSE_S)
    if scope["path"] == "/stuck":
        await asyncio.sleep(10)
    if scope["path"] == "/headers":
        while (await receive()).get("more_body"):
            pass
        told = b"%d headers" % len(scope["headers"])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(told))]})
    await send({"type": "http.response.body", "body": told})


@contextlib.asynccontextmanager
async def listening(keep_alive_s: int, app: Any = app, callers: KnownCallers | None = None) -> AsyncIterator[int]:
    """Serve `app` at the port; no requests are logged, as gateways and workers have it."""
    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, timeout_keep_alive=keep_alive_s)
    state = ServerState(form, Connections(ConnectionBounds.of(1024)), callers=callers)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: HttpProtocol(config, state, {}), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    for task in state.tasks:
        task.cancel()
    for connection in [*state.connections]:
        connection.transport.abort()
    await asyncio.sleep(0)


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(protocol, "HEAD_S", PAUSE_S / 2)
    async with listening(keep_alive_s=1) as there:
        yield there


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


async def test_a_connection_that_is_broken_off_is_forgotten_at_once() -> None:
    """Its keep-alive has a minute to go, and held all of it meanwhile."""
    config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_keep_alive=60)
    state = ServerState(form, Connections(ConnectionBounds.of(1024)))
    known: list[weakref.ref[HttpProtocol]] = []

    def made() -> HttpProtocol:
        one = HttpProtocol(config, state, {})
        known.append(weakref.ref(one))
        return one

    async with await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        writer.write(TINY)
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
        reset = struct.pack("ii", 1, 0)  # closing it breaks it off
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        writer.transport.abort()
        await asyncio.sleep(0.1)
        gc.collect()
        assert [one() for one in known] == [None]


async def test_an_idle_connection_holds_nothing_of_what_was_answered() -> None:
    """Thousands held 100 KiB each for a head without a key, and a body that nobody had read."""
    head = b"POST /%b HTTP/1.1\r\n" % (b"p" * 10_000) + b"".join(b"x%d: %b\r\n" % (n, b"a" * 200) for n in range(200))
    sent = head + b"content-length: 60000\r\n\r\n" + b"b" * 60_000
    loop = asyncio.get_running_loop()
    async with listening(keep_alive_s=60) as port:  # the connections stay until the test ends
        await said(port, b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")  # what the first one imports is no part of it
        with contextlib.ExitStack() as held:
            tracemalloc.start()
            held.callback(tracemalloc.stop)
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(20):
                client = held.enter_context(socket.socket())
                client.setblocking(False)
                await loop.sock_connect(client, ("127.0.0.1", port))
                await loop.sock_sendall(client, sent)
                assert (await loop.sock_recv(client, 1 << 16)).startswith(b"HTTP/1.1 200 ")
            await until(lambda: (tracemalloc.get_traced_memory()[0] - before) / 20 < 30_000, 5.0, "it is freed")


async def test_peers_that_leave_together_are_let_go_a_few_at_a_time() -> None:
    """The tasks of 500 calls that were given up together ended in one turn of the event loop, which took 80 ms."""
    turn, left_in = 0, Counter[int]()

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if left_in.total() < num_peers:
            asyncio.get_running_loop().call_soon(count_turns)

    async def leaving(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left_in[turn] += 1

    num_peers = 10 * FIRST_MOST
    async with listening(keep_alive_s=60, app=leaving) as port:
        peers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(num_peers)]
        for _, writer in peers:
            writer.write(TINY)
        await asyncio.sleep(0.1)
        assert not left_in
        count_turns()
        for _, writer in peers:
            writer.transport.abort()
        await until(lambda: left_in.total() == num_peers, 5.0, "all tasks hear of it")
    assert max(left_in.values()) <= 2 * FIRST_MOST


async def test_whoever_leaves_alone_does_not_wait_for_anothers_crowd_from_the_same_address() -> None:
    """Behind 3,000 half bodies, the slot of another team's stream, from behind the same proxy, came free 2 s late."""
    left = list[bytes]()

    async def leaving(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left.append(dict(scope["headers"])[b"authorization"].removeprefix(b"Bearer "))
        time.sleep(0.0005)

    callers = KnownCallers()
    for key in (b"crowd", b"alone"):
        callers.verified(key)
    async with listening(keep_alive_s=60, app=leaving, callers=callers) as port:
        peers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10 * FIRST_MOST + 1)]
        for number, (_, writer) in enumerate(peers):
            key = b"alone" if number == len(peers) - 1 else b"crowd"
            writer.write(b"GET / HTTP/1.1\r\nauthorization: Bearer %b\r\n\r\n" % key)
        await asyncio.sleep(0.3)
        for _, writer in peers:
            writer.transport.abort()
        await until(lambda: len(left) == len(peers), 5.0, "all tasks hear of it")
    assert left.index(b"alone") < len(left) // 2


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


@pytest.mark.parametrize("trailer", [b"a: %b", b"%b", b"a: b\r\n%b"])
async def test_a_trailer_without_end_is_not_read_on(port: int, trailer: bytes) -> None:
    """The parser keeps what has come of it, and copies that with each read."""
    head = b"POST /headers HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    chunk = b"x" * MAX_HEAD_BYTES
    assert await said(port, head + trailer % chunk, chunk, chunk, pause_s=0.02) == b""


async def test_chunks_of_one_byte_are_a_body(port: int) -> None:
    head = b"POST /headers HTTP/1.1\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    answer = await said(port, head + b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n")
    assert answer.endswith(b"2 headers")


async def test_a_body_that_goes_on_behind_its_answer_is_not_read_for_ever(port: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (1 << 40))
        with pytest.raises(OSError, match=r"reset|Broken pipe|lost"):  # noqa: PT012 - whichever write is the first
            async with asyncio.timeout(10):
                for _ in range(256):
                    writer.write(bytes(1 << 20))
                    await writer.drain()
    finally:
        writer.transport.abort()


async def test_chunks_behind_an_answer_end_the_connection(port: int) -> None:
    """Each costs the parser as much as a long one; the answer is read all the same."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def send() -> None:
        writer.write(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(1000):
            writer.write(b"1\r\nx\r\n" * 500)
            await asyncio.sleep(0.01)

    sending = asyncio.create_task(send())
    try:
        async with asyncio.timeout(4):
            assert (await reader.read()).endswith(b"ok")
    finally:
        sending.cancel()
        await asyncio.wait((sending,))
        writer.transport.abort()


async def test_chunks_that_come_at_once_are_parsed_over_many_turns(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, turn, ended = asyncio.get_running_loop(), 0, False
    chunks = Counter[int]()
    on_body = HttpToolsProtocol.on_body

    def count_turn() -> None:
        nonlocal turn
        turn += 1
        if not ended:
            loop.call_soon(count_turn)

    def count_chunk(there: HttpToolsProtocol, body: bytes) -> None:
        chunks[turn] += 1
        on_body(there, body)

    monkeypatch.setattr(HttpToolsProtocol, "on_body", count_chunk)
    head = b"POST /headers HTTP/1.1\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    count_turn()
    try:
        assert (await said(port, head + b"1\r\nx\r\n" * 40_000 + b"0\r\n\r\n")).endswith(b"2 headers")
    finally:
        ended = True
    assert chunks.total() == 40_000
    assert max(chunks.values()) <= 10_000


async def test_trailers_are_not_kept(port: int) -> None:
    head = b"POST /headers HTTP/1.1\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n0\r\n"
    answer = await said(port, head + b"a: b\r\n" * 1000 + b"\r\n")
    assert answer.endswith(b"2 headers")


@pytest.mark.parametrize("num_headers", [MAX_HEADERS, MAX_HEADERS + 1])
async def test_headers_are_counted(port: int, num_headers: int) -> None:
    headers = b"x: y\r\n" * (num_headers - 1)
    answer = await said(port, b"GET / HTTP/1.1\r\nconnection: close\r\n" + headers + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200 " if num_headers == MAX_HEADERS else b"HTTP/1.1 431 ")


async def test_what_is_no_http_is_told_so(port: int) -> None:
    answer = await said(port, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"This is no HTTP request." in answer


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4, 5, 17])
async def test_requests_ahead_of_answers_are_answered_in_turn(port: int, cut: int) -> None:
    """Wherever the reads divide them."""
    ahead = b"".join(b"GET /%s HTTP/1.1\r\n\r\n" % path for path in (b"slow", b"headers", b"slow"))
    last = b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n"
    sent = ahead + last
    half = len(b"GET /slow HTTP/1.1\r\n\r\n") + cut
    answer = await said(port, sent[:half], sent[half:], pause_s=0.05)
    assert answer.count(b"HTTP/1.1 200 ") == 4
    assert answer.index(b"0 headers") < answer.rindex(b"HTTP/1.1 200 ")


async def test_more_requests_ahead_end_the_connection(port: int) -> None:
    answer = await said(port, TINY * (MAX_PIPELINED + 1))
    assert answer.count(b"HTTP/1.1 200 ") == MAX_PIPELINED + 1
    answer = await said(port, TINY * 1000)
    assert answer.count(b"HTTP/1.1 200 ") <= MAX_PIPELINED + 1
    assert b"connection: close" in answer


async def test_more_requests_behind_chunks_end_the_connection(port: int) -> None:
    """The end of such a body is not known until it is parsed, and requests may be parsed with it."""
    first = b"POST /slow HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = await said(port, first, b"1\r\nx\r\n0\r\n\r\n" + TINY * 1000, pause_s=0.02)
    assert 1 < answer.count(b"HTTP/1.1 200 ") <= MAX_PIPELINED + 2
    assert b"connection: close" in answer


async def test_many_requests_ahead_are_not_kept(port: int) -> None:
    """The connection is not read while one is being answered, so the sender has to wait."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /stuck HTTP/1.1\r\n\r\n")
        num_bytes = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                while num_bytes < 64 << 20:
                    writer.write(TINY * 50_000)
                    await writer.drain()
                    num_bytes += 50_000 * len(TINY)
        # What the kernel keeps of a connection on loopback is some MiB.
        assert num_bytes < 64 << 20
    finally:
        writer.transport.abort()


async def test_a_refused_peer_reads_why_though_it_goes_on_sending(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET / HTTP/1.1\r\nx: " + b"x" * (2 << 20))
        async with asyncio.timeout(5):
            assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
    finally:
        writer.transport.abort()


async def test_chunks_are_written_at_once_until_the_buffers_are_full() -> None:
    """A token then costs a call, not two coroutines; what would wait is left to `send`, and nothing is mixed up."""
    written, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        write = scope["extensions"][CHUNK]["write"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(200):
            body = b"%d" % (number % 10) * 100_000
            if write(body):
                written.append(number)
            else:
                await send({"type": "http.response.body", "body": body, "more_body": True})
                sent.append(number)
        await send({"type": "http.response.body", "body": b"end", "more_body": False})

    async with listening(5, app) as port:
        answer = await said(port, b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    assert written
    assert sent, "a megabyte does not fit into the buffers"
    expected = b"".join(b"186a0\r\n%b\r\n" % (b"%d" % (number % 10) * 100_000) for number in range(200))
    assert body == expected + b"3\r\nend\r\n0\r\n\r\n"
