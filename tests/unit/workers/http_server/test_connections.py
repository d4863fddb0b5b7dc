"""Connections are bounded in all and per address; idle ones make room, and probes are answered beyond the bound."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
import uvicorn

from tests.support.waiting import until
from workers.http_server import connection as reading
from workers.http_server import connections
from workers.http_server.connections import ConnectionBounds, Connections, Verdict, network_of
from workers.http_server.protocol import HttpProtocol
from workers.http_server.server import HttpServer
from workers.http_server.state import CLOSED_AT_ONCE, Closing

MOST, PER_ADDRESS = 12, 8
IDLE_S = 0.5
HALF_A_HEAD = b"GET / HTTP/1.1\r\nx: "


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] == "/busy":
        await asyncio.sleep(30)
    told = b"ok" if scope["path"] not in ("/big", "/metrics") else bytes(16 << 20)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(told))]})
    await send({"type": "http.response.body", "body": told})


class Served:
    """A server on two addresses of this machine."""

    def __init__(self, server: HttpServer, port: int) -> None:
        self.state = server.state
        self.connections: Connections = server.state.bounded
        self.port = port
        self.opened = contextlib.AsyncExitStack()

    @contextlib.asynccontextmanager
    async def open(
        self, sent: bytes = b"", host: str = "127.0.0.1"
    ) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(host, 0))
        try:
            writer.write(sent)
            yield reader, writer
        finally:
            writer.transport.abort()

    async def keep_open(self, count: int, sent: bytes = b"", host: str = "127.0.0.1") -> list[asyncio.StreamReader]:
        return [(await self.opened.enter_async_context(self.open(sent, host)))[0] for _ in range(count)]

    async def ask(self, path: str, host: str = "127.0.0.1") -> bytes:
        """What is answered to a request that ends its connection."""
        request = f"GET {path} HTTP/1.1\r\nconnection: close\r\n\r\n".encode()
        async with self.open(request, host) as (reader, _), asyncio.timeout(5):
            return await reader.read()


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr(connections, "IDLE_S", IDLE_S)
    config = uvicorn.Config(app, http=HttpProtocol, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    reserved = frozenset((b"/health", b"/metrics"))
    bounds = ConnectionBounds(MOST, PER_ADDRESS, 1024, reserved, max_heads_bytes=100_000, max_long_heads_bytes=100_000)
    server = HttpServer(config, lambda refusal: refusal.message.encode(), bounds)
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen(64)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started, 5.0, "it listens")
        there = Served(server, listener.getsockname()[1])
        try:
            yield there
        finally:
            await there.opened.aclose()
            server.should_exit = True
            await task


async def test_half_heads_make_room(served: Served) -> None:
    await served.keep_open(PER_ADDRESS, HALF_A_HEAD, "127.0.0.2")
    await served.keep_open(MOST - PER_ADDRESS, HALF_A_HEAD, "127.0.0.3")
    answer = await served.ask("/")
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"There are too many connections" in answer
    assert (await served.ask("/health?x=1")).startswith(b"HTTP/1.1 200 ")
    await asyncio.sleep(IDLE_S)
    assert (await served.ask("/")).startswith(b"HTTP/1.1 200 ")


async def test_one_address_leaves_room_to_others(served: Served) -> None:
    await served.keep_open(PER_ADDRESS, b"GET /busy HTTP/1.1\r\n\r\n", "127.0.0.2")
    await until(lambda: served.connections.num_open == PER_ADDRESS, 5.0, "they are there")
    await asyncio.sleep(IDLE_S)
    assert (await served.ask("/", "127.0.0.2")).startswith(b"HTTP/1.1 503 ")
    assert (await served.ask("/health", "127.0.0.2")).startswith(b"HTTP/1.1 200 ")
    assert (await served.ask("/")).startswith(b"HTTP/1.1 200 ")


async def test_the_longest_idle_is_closed_first_and_none_that_is_answered(served: Served) -> None:
    asked = b"GET / HTTP/1.1\r\n\r\n"
    first, second = await served.keep_open(2, asked)
    await first.readuntil(b"ok")
    await second.readuntil(b"ok")
    await served.keep_open(MOST - PER_ADDRESS, b"GET /busy HTTP/1.1\r\n\r\n", "127.0.0.2")
    await asyncio.sleep(IDLE_S)
    await served.keep_open(PER_ADDRESS - 2, b"GET /busy HTTP/1.1\r\n\r\n")
    await served.keep_open(1, b"GET /busy HTTP/1.1\r\n\r\n", "127.0.0.3")
    async with asyncio.timeout(5):
        assert await first.read() == b""
    assert not second.at_eof()
    assert served.connections.num_open == MOST


async def test_a_flood_of_connections_without_a_head_lets_probes_through(served: Served) -> None:
    """Beyond what is kept in reserve they wait in the system's queue, and are not reset."""

    async def flood() -> None:
        while True:
            await served.keep_open(20, HALF_A_HEAD, "127.0.0.2")
            await asyncio.sleep(0.01)

    flooding = asyncio.create_task(flood())
    try:
        await asyncio.sleep(0.3)
        for _ in range(5):
            assert (await served.ask("/health")).startswith(b"HTTP/1.1 200 ")
    finally:
        flooding.cancel()
        await asyncio.wait((flooding,))


async def test_heads_that_have_begun_are_bounded_together(served: Served) -> None:
    first, second = await served.keep_open(2, HALF_A_HEAD + b"x" * 40_000)
    await asyncio.sleep(0.05)
    await served.keep_open(1, HALF_A_HEAD + b"x" * 40_000)
    async with asyncio.timeout(5):
        assert (await first.read()).startswith(b"HTTP/1.1 408 ")
    assert not second.at_eof()


async def test_a_short_head_that_comes_slowly_is_not_cut_off_for_long_ones(served: Served) -> None:
    (slow,) = await served.keep_open(1, HALF_A_HEAD + b"x" * 300)
    await asyncio.sleep(0.05)
    for _ in range(3):
        long = await served.keep_open(3, HALF_A_HEAD + b"x" * 40_000)
        async with asyncio.timeout(5):
            assert (await long[0].read()).startswith(b"HTTP/1.1 408 ")
    assert not slow.at_eof()


async def test_headers_of_heads_that_have_begun_count_with_what_they_take(served: Served) -> None:
    """A header of four bytes takes forty times as much."""
    tiny = b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 250
    first, second = await served.keep_open(2, tiny)
    await asyncio.sleep(0.05)
    await served.keep_open(1, tiny)
    async with asyncio.timeout(5):
        assert (await first.read()).startswith(b"HTTP/1.1 408 ")
    assert not second.at_eof()


async def test_long_heads_under_way_are_bounded_together(served: Served) -> None:
    """The newest is refused; who sends a short one is none of theirs."""
    long = b"GET /%b HTTP/1.1\r\nconnection: close\r\nx: " + b"x" * 45_000 + b"\r\n\r\n"
    await served.keep_open(1, long % b"busy")
    async with served.open(long % b"busy") as (reader, _):
        await asyncio.sleep(0.05)
        async with served.open(long % b"") as (refused, _), asyncio.timeout(5):
            answer = await refused.read()
            assert answer.startswith(b"HTTP/1.1 431 ")
            assert b"Send fewer and shorter headers." in answer
        assert (await served.ask("/")).startswith(b"HTTP/1.1 200 ")
        assert not reader.at_eof()
    await asyncio.sleep(0.05)
    for _ in range(3):  # it counts until it is answered
        async with served.open(long % b"") as (answered, _), asyncio.timeout(5):
            assert (await answered.read()).startswith(b"HTTP/1.1 200 ")


async def test_long_heads_that_wait_for_their_turn_count_as_well(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unparsed, and until their turn has come or they have left."""
    pacer = served.state.pacer
    long = b"GET / HTTP/1.1\r\nconnection: close\r\nx: " + b"x" * 45_000 + b"\r\n\r\n"
    with monkeypatch.context() as crowded:
        crowded.setattr(pacer, "may_begin", lambda: False)
        crowded.setattr(pacer, "_turn_soon", lambda: None)
        (first,) = await served.keep_open(1, long)
        async with served.open(long):
            await until(lambda: pacer.num_waiting == 2, 5.0, "both wait")
            async with served.open(long) as (refused, _), asyncio.timeout(5):
                assert (await refused.read()).startswith(b"HTTP/1.1 431 ")
        await until(lambda: pacer.num_waiting == 1, 5.0, "one has left")
        (second,) = await served.keep_open(1, long)
        await until(lambda: pacer.num_waiting == 2, 5.0, "there is room")
    assert (await served.ask("/health")).startswith(b"HTTP/1.1 200 ")
    for reader in (first, second):
        async with asyncio.timeout(5):
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")


async def test_who_does_not_read_makes_room_as_well(served: Served) -> None:
    """Its connection would stay open until it has read the answer."""
    there = [await asyncio.to_thread(deaf, served.port) for _ in range(2)]
    await until(lambda: served.connections.num_open == 2, 5.0, "they are there")
    await served.keep_open(MOST - PER_ADDRESS, b"GET /busy HTTP/1.1\r\n\r\n", "127.0.0.2")
    await served.keep_open(PER_ADDRESS - 2, b"GET /busy HTTP/1.1\r\n\r\n", "127.0.0.3")
    await asyncio.sleep(IDLE_S)
    for _ in range(2):
        await served.keep_open(1, b"GET /busy HTTP/1.1\r\n\r\n")
    # uvicorn knows them until they are closed.
    await until(lambda: served.connections.num_open == len(served.state.connections) == MOST, 5.0, "both are closed")
    for connection in there:
        connection.close()


@pytest.fixture
def few_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_BEYOND", 4)


@pytest.mark.usefixtures("few_beyond")
async def test_who_is_answered_beyond_the_bound_and_does_not_read_keeps_nobody_out(served: Served) -> None:
    await served.keep_open(PER_ADDRESS, b"GET /busy HTTP/1.1\r\n\r\n", "127.0.0.2")
    await served.keep_open(MOST - PER_ADDRESS, b"GET /busy HTTP/1.1\r\n\r\n", "127.0.0.3")
    await until(lambda: served.connections.num_open == MOST, 5.0, "they are there")
    there = [await asyncio.to_thread(deaf, served.port, b"GET /metrics HTTP/1.1\r\n\r\n") for _ in range(4)]
    try:
        await until(lambda: served.state.total_requests >= 4, 5.0, "they are answered")
        assert (await served.ask("/health", "127.0.0.4")).startswith(b"HTTP/1.1 200 ")
    finally:
        for connection in there:
            connection.close()


@pytest.mark.usefixtures("few_beyond")
async def test_who_is_refused_again_and_again_keeps_probes_of_others_from_nothing(served: Served) -> None:
    """Each waited a second for more of its peer: with connections faster than that nobody else was answered."""
    await served.keep_open(PER_ADDRESS, b"GET /busy HTTP/1.1\r\n\r\n", "127.0.0.2")
    await served.keep_open(MOST - PER_ADDRESS, b"GET /busy HTTP/1.1\r\n\r\n", "127.0.0.3")
    await until(lambda: served.connections.num_open == MOST, 5.0, "they are there")

    async def flood() -> None:
        while True:
            for host in ("127.0.0.5", "127.0.0.6", "127.0.0.7"):
                await served.keep_open(2, b"GET /v1/models HTTP/1.1\r\n\r\n", host)
            await asyncio.sleep(0.02)

    flooding = asyncio.create_task(flood())
    try:
        await asyncio.sleep(0.2)
        began = time.monotonic()
        for path in ("/health", "/health?x=1", "/health"):
            assert (await served.ask(path, "127.0.0.4")).startswith(b"HTTP/1.1 200 ")
        assert time.monotonic() - began < 3.0
    finally:
        flooding.cancel()
        await asyncio.wait((flooding,))


async def test_what_is_left_when_a_connection_closes_is_not_kept_for_ever(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a server has all patience with who does not read an answer under way."""
    monkeypatch.setattr(reading, "LEFT_S", 0.3)
    with await asyncio.to_thread(deaf, served.port, b"GET /big HTTP/1.1\r\nconnection: close\r\n\r\n"):
        await until(lambda: served.state.total_requests == 1, 5.0, "it is answered")
        await until(lambda: served.connections.num_open == 0, 5.0, "it is cut")


def deaf(port: int, sent: bytes = b"GET /big HTTP/1.1\r\n\r\n") -> socket.socket:
    """A client that asks for much and reads nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.sendall(sent)
    return connection


@pytest.mark.parametrize(
    ("one", "another", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::2", True),
    ],
)
def test_what_counts_as_one_address(one: str, another: str, same: bool) -> None:
    assert (network_of(one) == network_of(another)) is same


async def test_what_closes_is_not_counted(served: Served) -> None:
    for _ in range(3 * MOST):
        assert (await served.ask("/")).startswith(b"HTTP/1.1 200 ")
    await until(lambda: served.connections.num_open == 0, 5.0, "none is left")


class Quiet:
    """A connection that is closed when it is told to."""

    def __init__(self) -> None:
        self.closed = False

    def make_room(self) -> None:
        self.closed = True

    def cut_unfinished(self) -> None:
        self.closed = True


def test_a_high_descriptor_shows_that_few_are_left() -> None:
    few = Connections(ConnectionBounds.of(400))
    assert few.came(Quiet(), "a", 200) is Verdict.WITHIN
    assert few.came(Quiet(), "a", 350) is Verdict.BEYOND


@pytest.mark.parametrize("num_descriptors", [16, 64, 256, 1024, 4096, 20_000, 1 << 20])
def test_bounds_leave_descriptors_for_everything_else(num_descriptors: int) -> None:
    bounds = ConnectionBounds.of(num_descriptors)
    assert 1 <= bounds.most <= connections.MAX_CONNECTIONS
    assert num_descriptors - bounds.most >= num_descriptors // 4 or num_descriptors > 1024
    assert ConnectionBounds.of(num_descriptors, 10, 0.5).most_per_address <= 5
    assert ConnectionBounds.of(num_descriptors, most=1 << 30).most <= num_descriptors


@pytest.mark.serial
def test_counting_costs_little() -> None:
    """Twice per request, with as many connections as there may be."""
    many = Connections(ConnectionBounds(20_000, 20_000, 1 << 20))
    there = [Quiet() for _ in range(16_000)]
    for connection in there:
        many.came(connection, "a", 100)
    began = time.perf_counter()
    for connection in there:
        many.busy(connection)
        many.idle(connection)
    assert (time.perf_counter() - began) / len(there) < 50e-6


async def test_thousands_that_end_at_once_are_closed_over_many_turns() -> None:
    closing, loop = Closing(), asyncio.get_running_loop()
    closed = 0

    class Ending(asyncio.Transport):
        def close(self) -> None:
            nonlocal closed
            closed += 1

    for _ in range(10 * CLOSED_AT_ONCE):
        closing.add(Ending(), loop)
    for turn in range(10):
        assert closed == turn * CLOSED_AT_ONCE
        await asyncio.sleep(0)
    assert closed == 10 * CLOSED_AT_ONCE
    closing.add(Ending(), loop)
    await asyncio.sleep(0)
    assert closed == 10 * CLOSED_AT_ONCE + 1
