"""Messages of WebSockets are read in pieces, and what has begun is bounded over all connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from uvicorn._types import ASGIReceiveEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from gateway.api.http.websocket_protocol import LONG_TEXT_BYTES, WebSocketProtocol, refusal_body
from tests.support.waiting import until
from workers.http_server import connection
from workers.http_server.connections import ConnectionBounds, Unfinished
from workers.http_server.pacer import FIRST_MOST
from workers.http_server.protocol import HttpProtocol
from workers.http_server.server import HttpServer

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
MAX_BYTES = 300_000
PING = b"\x89\x80\0\0\0\0"


def frame(num_bytes: int) -> bytes:
    return b"\x81\xff" + num_bytes.to_bytes(8, "big") + bytes(4) + b"x" * num_bytes


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Tells of each message how long it was; on `/left` leaves a little unread, which `/left/closed` closes."""
    await receive()
    if scope["path"] == "/later":
        await asyncio.sleep(10)
    await send({"type": "websocket.accept"})
    if scope["path"].startswith("/left"):
        (connection,) = SERVERS[-1].state.connections
        while not connection.transport.get_write_buffer_size():
            await send({"type": "websocket.send", "bytes": bytes(16 << 10)})
        if scope["path"].endswith("closed"):
            assert isinstance(connection, WebSocketsSansIOProtocol)
            connection.close_timeout = 0.1
            await send({"type": "websocket.close"})
            return
    while (event := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": str(len(event["text"] if "text" in event else event["bytes"]))})


SERVERS: list[HttpServer] = []


@pytest.fixture
async def port() -> AsyncIterator[int]:
    config = uvicorn.Config(
        app, http=HttpProtocol, ws=WebSocketProtocol, ws_ping_interval=None, lifespan="off", log_config=None
    )
    config.timeout_graceful_shutdown = 1
    server = HttpServer(config, refusal_body, ConnectionBounds.of(1024))
    server.state.messages = Unfinished(MAX_BYTES)
    SERVERS.append(server)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started, 5.0, "it listens")
        yield listener.getsockname()[1]
        server.should_exit = True
        await task


async def opened(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HANDSHAKE)
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def test_messages_of_any_length_are_read_whole_and_in_turn(port: int) -> None:
    reader, writer = await opened(port)
    lengths = [0, 1, 5, 4096, 70_000, 4090, 250_000, 2, 3]
    sent = b"".join(frame(length) for length in lengths)
    for place in range(0, len(sent), 10_001):
        writer.write(sent[place : place + 10_001])
    told = b"".join(b"\x81%c%d" % (len(str(length)), length) for length in lengths)
    async with asyncio.timeout(5):
        assert await reader.readexactly(len(told)) == told
    writer.transport.abort()


@pytest.mark.parametrize(
    "wrong", [b"\x80\x80\0\0\0\0", b"\xff\x80\0\0\0\0", b"\x88\x80\0\0\0\0"], ids=["continued", "reserved", "close"]
)
async def test_a_wrong_frame_before_the_connection_is_accepted_ends_it(
    port: int, wrong: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it waited for its turn to be parsed, uvicorn's error left it paused for reading, and open for ever."""
    monkeypatch.setattr(SERVERS[-1].state.parse_turns, "may_parse", lambda: False)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HANDSHAKE.replace(b"GET /", b"GET /later"))
    await asyncio.sleep(0.1)
    writer.write(wrong)
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.transport.abort()
    assert not SERVERS[-1].state.connections


async def test_peers_that_leave_together_are_let_go_a_few_at_a_time(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """250 sockets with eight streams each that broke off together took 170 ms of one turn of the event loop."""
    turn, left_in = 0, Counter[int]()
    receive = WebSocketProtocol.receive

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if left_in.total() < 80:
            asyncio.get_running_loop().call_soon(count_turns)

    async def counted(self: WebSocketProtocol) -> ASGIReceiveEvent:
        event = await receive(self)
        left_in[turn] += event["type"] == "websocket.disconnect"
        return event

    monkeypatch.setattr(WebSocketProtocol, "receive", counted)
    peers = [await opened(port) for _ in range(80)]
    await asyncio.sleep(0.1)
    count_turns()
    for _, writer in peers:
        writer.transport.abort()
    await until(lambda: left_in.total() == len(peers), 5.0, "all tasks hear of it")
    assert max(left_in.values()) <= 2 * FIRST_MOST


async def test_a_long_text_is_passed_on_as_its_bytes() -> None:
    """Whoever takes it decodes it, away from the event loop; a short one costs nothing."""
    messages: list[ASGIReceiveEvent] = []
    connection = cast(Any, WebSocketProtocol.__new__(WebSocketProtocol))
    connection.close_sent, connection.read_paused, connection.curr_msg_data_type = False, True, "text"
    connection.queue = SimpleNamespace(put_nowait=messages.append)
    for num_bytes in (LONG_TEXT_BYTES, LONG_TEXT_BYTES + 1):
        connection.frames = [b"x", b"x" * (num_bytes - 1)]
        connection.send_receive_event_to_app()
        assert connection.frames == []
    short, long = messages
    assert short == {"type": "websocket.receive", "text": "x" * LONG_TEXT_BYTES}
    assert long == {"type": "websocket.receive", "bytes": b"x" * (LONG_TEXT_BYTES + 1), "is_text": True}


async def test_parts_of_any_size_count_until_the_message_is_taken(port: int) -> None:
    """Parts below a page were not counted, however long the message was; pings are no message."""
    connections = [await opened(port) for _ in range(3)]
    messages = SERVERS[-1].state.messages
    parts = frame(100_000)
    for place in range(0, 60_000, 1000):
        for _, writer in connections:
            writer.write(parts[place : place + 1000])
        await asyncio.sleep(0)
    await until(lambda: messages.num_bytes >= 3 * 60_000, 5.0, "all is counted")
    for reader, writer in connections[:2]:
        writer.write(parts[60_000:])
        async with asyncio.timeout(5):
            assert await reader.readexactly(8) == b"\x81\x06100000"
    await until(lambda: messages.num_bytes == 60_000, 5.0, "what is taken does not count")
    connections[2][1].transport.abort()
    connections[1][1].write(PING * 5000)
    await until(lambda: messages.num_bytes == 0, 5.0, "pings do not count")
    for _, writer in connections:
        writer.transport.abort()


async def test_a_short_message_that_comes_slowly_is_not_cut_off_for_long_ones(port: int) -> None:
    slow, *long = [await opened(port) for _ in range(5)]
    slow[1].write(frame(30_000)[:20_000])
    await asyncio.sleep(0.1)
    for _, writer in long:
        writer.write(frame(200_000)[:130_000])
    async with asyncio.timeout(5):
        assert (await long[0][0].read())[:1] == b"\x88"
    slow[1].write(frame(30_000)[20_000:])
    async with asyncio.timeout(5):
        assert await slow[0].readexactly(7) == b"\x81\x0530000"
    for _, writer in (slow, *long):
        writer.transport.abort()


async def test_the_message_that_began_first_makes_room(port: int) -> None:
    first, second, third = [await opened(port) for _ in range(3)]
    for _, writer in (first, second):
        writer.write(frame(200_000)[:130_000])
        await asyncio.sleep(0.1)
    third[1].write(frame(100_000))
    async with asyncio.timeout(5):
        assert await third[0].readexactly(8) == b"\x81\x06100000"
        closed = await first[0].read()
    assert closed[:1] == b"\x88"
    assert closed[2:4] == (1013).to_bytes(2, "big")
    second[1].write(frame(200_000)[130_000:])
    async with asyncio.timeout(5):
        assert await second[0].readexactly(8) == b"\x81\x06200000"
    for _, writer in (first, second, third):
        writer.transport.abort()


@pytest.mark.parametrize("first", [b"\x81", b"\x82", b"\x01"], ids=["text", "bytes", "fragments"])
async def test_an_idle_socket_holds_nothing_of_its_last_message(port: int, first: bytes) -> None:
    """Its parser kept the last frame: sixty sockets held 420 MB that nothing counted."""
    reader, writer = await opened(port)
    writer.write(first + frame(200_000)[1:] + (b"\x80" + frame(50_000)[1:] if first == b"\x01" else b""))
    async with asyncio.timeout(5):
        assert await reader.readexactly(8) == (b"\x81\x06250000" if first == b"\x01" else b"\x81\x06200000")
    assert max((len(one.data) for one in gc.get_objects() if type(one) is Frame), default=0) < 100
    writer.transport.abort()


async def test_a_flood_of_small_frames_leaves_turns_to_others(port: int) -> None:
    """What one read brings is parsed over many turns of the loop; all at once it took a third of a second."""
    reader, writer = await opened(port)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    writer.write(PING * 20_000 + frame(1))
    told = b""
    async with asyncio.timeout(20):
        while not told.endswith(b"\x81\x011"):
            told += await reader.read(1 << 16)
    counting.cancel()
    assert told.count(b"\x8a\x00") == 20_000
    assert turns > 20_000 * len(PING) // (4 << 10)
    writer.transport.abort()


CLOSE = b"\x88\x80\0\0\0\0"


@pytest.mark.parametrize(("path", "sent"), [("/left", CLOSE), ("/left", b"\x83\x80\0\0\0\0"), ("/left/closed", b"")])
async def test_what_is_left_when_a_socket_closes_is_not_kept_for_ever(
    port: int, monkeypatch: pytest.MonkeyPatch, path: str, sent: bytes
) -> None:
    """Closed by its peer, by a fault of its peer, or by the server; the peer reads nothing."""
    monkeypatch.setattr(connection, "LEFT_S", 0.2)
    state, loop = SERVERS[-1].state, asyncio.get_running_loop()
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.setblocking(False)
        await loop.sock_connect(peer, ("127.0.0.1", port))
        await loop.sock_sendall(peer, HANDSHAKE.replace(b"GET /", b"GET " + path.encode()))
        await until(lambda: any(_left(connection) for connection in state.connections), 5.0, "something is left")
        await loop.sock_sendall(peer, sent)
        await until(lambda: not state.connections, 5.0, "it is cut")


def _left(connection: Any) -> bool:
    return bool(connection.transport.get_write_buffer_size())


@pytest.mark.parametrize("last", [b"\x88\x80\0\0\0\0", b""], ids=["closed", "broken off"])
async def test_one_that_has_ended_is_gone_at_once(port: int, last: bytes) -> None:
    """The protocol of its handshake and its parser held each other; collecting hundreds held the loop up."""
    connections = SERVERS[-1].state.connections
    gc.collect()
    gc.disable()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: len(connections) == 1, 5.0, "the connection is taken")
        protocols = [weakref.ref(next(iter(connections)))]
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        protocols.append(weakref.ref(next(iter(connections))))
        assert isinstance(protocols[1](), WebSocketProtocol)
        writer.write(last)
        await writer.drain()
        writer.close()
        await until(lambda: [protocol() for protocol in protocols] == [None, None], 5.0, "they are gone")
    finally:
        gc.enable()
