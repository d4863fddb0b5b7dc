"""TLS records are decrypted in turns, however small they are, by either event loop."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from time import thread_time
from typing import Any

import pytest
import uvloop

from tests.support.tls_peer import IS_THERE, TlsPeer
from tests.support.tls_proxy import Certificates, make_certificates
from tests.support.waiting import until
from workers.http_server import tls_transport
from workers.http_server.acceptor import Acceptor
from workers.http_server.connections import Closable, ConnectionBounds, Connections
from workers.http_server.pacer import ParseTurns, Parsing
from workers.http_server.records import AT_ONCE, MOST_BYTES, RecordHeads
from workers.http_server.tls import Tls, TlsFiles

MANY, NUM_PEERS = 10_000, 8
LONG_TURN_S = 0.03
"""Processor seconds of one turn of the event loop: a tenth of what as many records take."""

needs_library = pytest.mark.skipif(not IS_THERE, reason="this machine has no OpenSSL library of a known name")

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on one kind of event loop."""

    def run_on(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(work)

    return run_on


class Heard(asyncio.Protocol):
    """A connection that notes what comes."""

    handshake: Closable | None = None

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.turns: list[int] = []
        """The turn of the event loop in which each came."""
        self.turn: Callable[[], int] = lambda: 0
        self.is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)
        self.turns.append(self.turn())

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over = True


class ClosedAtOnce(Heard):
    """A connection that the server closes as soon as it is open."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.close()


@contextmanager
def accepting(
    certificates: Certificates,
    made: list[Heard],
    host: str = "127.0.0.1",
    turns: ParseTurns | None = None,
    kind: type[Heard] = Heard,
) -> Iterator[int]:
    def new() -> Heard:
        made.append(kind())
        return made[-1]

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        tls = Tls(TlsFiles(certificates.server, certificates.server_key))
        running = Acceptor(listener, Connections(ConnectionBounds.of(1024)), new, None, tls, turns)
        running.start()
        try:
            yield listener.getsockname()[1]
        finally:
            running.close()


class Talker:
    """A peer that encrypts what it sends beforehand."""

    def __init__(self, certificates: Certificates, port: int, host: str = "127.0.0.1") -> None:
        self.socket = socket.create_connection((host, port))
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context(cafile=str(certificates.ca))
        self._tls = context.wrap_bio(self._in, self._out, server_hostname="127.0.0.1")

    def shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self.socket.sendall(self._out.read())
                self._in.write(self.socket.recv(1 << 16))
            else:
                self.socket.sendall(self._out.read())
                return

    def records(self, *contents: bytes) -> bytes:
        for content in contents:
            self._tls.write(content)
        return self._out.read()


@asynccontextmanager
async def timed_turns() -> AsyncIterator[list[float]]:
    """Measure each turn of the event loop, in processor seconds of its thread."""
    took = list[float]()

    async def measure() -> None:
        last = thread_time()
        while True:
            await asyncio.sleep(0)
            now = thread_time()
            took.append(now - last)
            last = now

    measuring = asyncio.create_task(measure())
    try:
        yield took
    finally:
        measuring.cancel()


@contextmanager
def peers(port: int, count: int, *, is_old: bool = False) -> Iterator[list[tuple[TlsPeer, socket.socket]]]:
    """Open connections and shake hands on them."""
    with ExitStack() as held:
        opened = []
        for _ in range(count):
            peer = held.enter_context(TlsPeer(is_old=is_old))
            connection = held.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.settimeout(30)
            peer.shake_hands_by(connection)
            opened.append((peer, connection))
        yield opened


def send_all(opened: list[tuple[TlsPeer, socket.socket]]) -> None:
    """Send what the peers have written, as far as it is taken."""
    for peer, connection in opened:
        with suppress(ConnectionError):
            connection.sendall(peer.encrypted())


def test_heads_are_followed_however_they_are_cut() -> None:
    sizes = [0, 1, 5, 16384, 3, *([2] * (3 * AT_ONCE)), 300]
    sent = b"".join(b"\x17\x03\x03" + size.to_bytes(2) + b"x" * size for size in sizes)
    for step in (1, 2, 4, 5, 6, 7, 100, 20_000, len(sent)):
        heads, rest, taken, num_records = RecordHeads(), b"", b"", 0
        for start in range(0, len(sent), step):
            rest += sent[start : start + step]
            while rest:
                size, more = heads.take(memoryview(rest))
                assert more <= AT_ONCE
                if not size:
                    assert len(rest) < 5
                    break
                taken, rest, num_records = taken + rest[:size], rest[size:], num_records + more
        assert (taken, num_records) == (sent, len(sizes)), step


def test_what_is_no_record_is_left_to_openssl() -> None:
    for sent in (b"\x17\x03\x03" + (MOST_BYTES + 1).to_bytes(2) + b"x", b"GET / HTTP/1.1\r\n\r\n"):
        assert RecordHeads().take(memoryview(sent)) == (len(sent), 1)


def test_records_of_a_byte_are_decrypted_over_many_turns(certificates: Certificates, run: Run) -> None:
    """450 KB of them held the event loop for 0.2 s, and eight connections with as many for 1.3 s, without a key."""

    async def flood() -> None:
        made, wanted = list[Heard](), bytes(number % 256 for number in range(MANY))
        with accepting(certificates, made) as port, ExitStack() as held:
            talkers = [Talker(certificates, port) for _ in range(NUM_PEERS)]
            for talker in talkers:
                held.enter_context(talker.socket)
            await asyncio.gather(*(asyncio.to_thread(talker.shake_hands) for talker in talkers))
            await until(lambda: len(made) == NUM_PEERS, 10.0, "all are there")
            turn = 0

            async def count_turns() -> None:
                nonlocal turn
                while True:
                    turn += 1
                    await asyncio.sleep(0)

            for one in made:
                one.turn = lambda: turn
            counting = asyncio.create_task(count_turns())
            sent = [talker.records(*(bytes([byte]) for byte in wanted)) for talker in talkers]
            await asyncio.gather(
                *(asyncio.to_thread(talker.socket.sendall, text) for talker, text in zip(talkers, sent, strict=True))
            )
            await until(lambda: all(sum(map(len, one.pieces)) == MANY for one in made), 30.0, "all is read")
            counting.cancel()
        assert all(b"".join(one.pieces) == wanted for one in made)
        in_turn: dict[int, int] = {}
        for one in made:
            for number, piece in zip(one.turns, one.pieces, strict=True):
                in_turn[number] = in_turn.get(number, 0) + len(piece)
        assert max(in_turn.values()) < MANY // 2, "as many records are decrypted in one turn"

    run(flood())


@needs_library
@pytest.mark.parametrize("asks", [False, True])
def test_who_sends_records_without_content_is_cut_off(certificates: Certificates, run: Run, asks: bool) -> None:
    """10,000 KeyUpdates held the event loop for 78 ms, and for 160 ms if each asked for one in return."""

    async def flood() -> None:
        made = list[Heard]()
        with accepting(certificates, made) as port, ExitStack() as held:
            opened = await asyncio.to_thread(held.enter_context, peers(port, 1))
            opened[0][0].update_keys(MANY, asks=asks)
            async with timed_turns() as took:
                await asyncio.to_thread(send_all, opened)
                await until(lambda: made[0].is_over, 10.0, "it is cut off")
            assert max(took) < LONG_TURN_S

    run(flood())


@needs_library
def test_records_without_content_are_decrypted_over_many_turns(
    certificates: Certificates, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A content behind every few is no way round it: what bounds a turn is not who is cut off."""
    monkeypatch.setattr(tls_transport, "MAX_EMPTY", 100 * MANY)

    async def flood() -> None:
        made = list[Heard]()
        with accepting(certificates, made) as port, ExitStack() as held:
            opened = await asyncio.to_thread(held.enter_context, peers(port, 2))
            for peer, _ in opened:
                for _ in range(MANY // 1000):
                    peer.update_keys(999)
                    peer.say(b"x")
            async with timed_turns() as took:
                await asyncio.to_thread(send_all, opened)
                await until(lambda: all(sum(map(len, one.pieces)) == MANY // 1000 for one in made), 30.0, "all is read")
            assert max(took) < LONG_TURN_S

    run(flood())


@needs_library
def test_a_few_new_keys_are_no_trouble(certificates: Certificates, run: Run) -> None:
    async def talk() -> None:
        made = list[Heard]()
        with accepting(certificates, made) as port, ExitStack() as held:
            opened = await asyncio.to_thread(held.enter_context, peers(port, 1))
            peer, _ = opened[0]
            for number in range(20):
                peer.update_keys(2, asks=number % 2 == 0)
                peer.say(b"x" * number)
            await asyncio.to_thread(send_all, opened)
            await until(lambda: sum(map(len, made[0].pieces)) == sum(range(20)), 10.0, "all is read")
            assert not made[0].is_over

    run(talk())


@needs_library
def test_tiny_records_of_tls_1_2_are_decrypted_over_many_turns(certificates: Certificates, run: Run) -> None:
    async def flood() -> None:
        made = list[Heard]()
        with accepting(certificates, made) as port, ExitStack() as held:
            opened = await asyncio.to_thread(lambda: held.enter_context(peers(port, 4, is_old=True)))
            for peer, _ in opened:
                peer.say(*[b"x"] * MANY)
            async with timed_turns() as took:
                await asyncio.to_thread(send_all, opened)
                await until(lambda: all(sum(map(len, one.pieces)) == MANY for one in made), 30.0, "all is read")
            assert max(took) < LONG_TURN_S

    run(flood())


@needs_library
def test_what_comes_after_the_end_is_decrypted_over_many_turns(certificates: Certificates, run: Run) -> None:
    """Once a server had closed, all that had come was decrypted in one go, for 30 s: 0.3 s for 32 connections."""

    async def flood() -> None:
        made = list[Heard]()
        with accepting(certificates, made, kind=ClosedAtOnce) as port, ExitStack() as held:
            opened = await asyncio.to_thread(held.enter_context, peers(port, NUM_PEERS))
            for peer, _ in opened:
                peer.say(*[b"x"] * MANY)
                peer.end()
            async with timed_turns() as took:
                await asyncio.to_thread(send_all, opened)
                await until(lambda: all(one.is_over for one in made), 30.0, "all is read, to the peers' own end")
            assert max(took) < LONG_TURN_S
            assert not any(one.pieces for one in made)

    run(flood())


class NotedTurns(ParseTurns):
    """Notes the lines in which connections wait."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = set[str]()

    def wait(self, connection: Parsing, caller: str) -> None:
        self.lines.add(caller)
        super().wait(connection, caller)


def test_all_addresses_of_a_network_wait_in_one_line(certificates: Certificates, run: Run) -> None:
    """They belong to one peer, who would have as many lines in the rotation as it has addresses."""
    turns = NotedTurns()

    async def flood() -> None:
        made = list[Heard]()
        with accepting(certificates, made, "::1", turns) as port:
            talker = Talker(certificates, port, "::1")
            with talker.socket:
                await asyncio.to_thread(talker.shake_hands)
                text = talker.records(*[b"x"] * MANY)
                await asyncio.to_thread(talker.socket.sendall, text)
                await until(lambda: sum(map(len, made[0].pieces)) == MANY, 30.0, "all is read")

    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    run(flood())
    assert turns.lines == {"::/64"}


def test_a_peer_may_not_shake_hands_again(certificates: Certificates) -> None:
    assert TlsFiles(certificates.server, certificates.server_key).context().options & ssl.OP_NO_RENEGOTIATION


def test_large_records_are_decrypted_in_large_pieces(certificates: Certificates, run: Run) -> None:
    async def send() -> None:
        made, wanted = list[Heard](), bytes(8 << 20)
        with accepting(certificates, made) as port:
            talker = Talker(certificates, port)
            with talker.socket:
                await asyncio.to_thread(talker.shake_hands)
                await until(lambda: len(made) == 1, 10.0, "it is there")
                text = talker.records(*(wanted[:16384] for _ in range(512)))
                await asyncio.to_thread(talker.socket.sendall, text)
                await until(lambda: sum(map(len, made[0].pieces)) == len(wanted), 30.0, "all is read")
        assert len(made[0].pieces) < 1500

    run(send())


def test_a_connection_reads_when_its_protocol_wants_more(certificates: Certificates, run: Run) -> None:
    async def hold() -> None:
        made = list[Heard]()
        with accepting(certificates, made) as port:
            talker = Talker(certificates, port)
            with talker.socket:
                await asyncio.to_thread(talker.shake_hands)
                await until(lambda: len(made) == 1, 10.0, "it is there")
                first, second = made[0], Heard()
                assert first.transport.is_reading()
                first.transport.pause_reading()
                assert not first.transport.is_reading()
                talker.socket.sendall(talker.records(b"abc"))
                await asyncio.sleep(0.1)
                assert not first.pieces
                first.transport.set_protocol(second)
                assert first.transport.get_protocol() is second
                first.transport.resume_reading()
                await until(lambda: second.pieces == [b"abc"], 5.0, "the new one reads it")

    run(hold())


@pytest.mark.parametrize("is_closed_here", [True, False])
def test_a_connection_that_has_ended_leaves_nothing_for_the_cycle_collector(
    certificates: Certificates, run: Run, is_closed_here: bool
) -> None:
    """Its protocol and its TLS layer held each other: 45 KiB until the cycle collector ran."""

    async def end() -> None:
        made = list[Heard]()
        with accepting(certificates, made) as port:
            talker = Talker(certificates, port)
            with talker.socket:
                await asyncio.to_thread(talker.shake_hands)
                await until(lambda: len(made) == 1, 10.0, "it is there")
                talker.socket.sendall(talker.records(b"abc"))
                await until(lambda: made[0].pieces == [b"abc"], 5.0, "it has read")
                protocol, transport = weakref.ref(made[0]), weakref.ref(made[0].transport)
                if is_closed_here:
                    made[0].transport.abort()
                made.clear()
            await until(lambda: protocol() is None and transport() is None, 5.0, "it is gone")

    gc.collect()
    gc.disable()
    try:
        run(end())
    finally:
        gc.enable()
