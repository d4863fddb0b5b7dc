"""TLS records are decrypted in turns, however small they are, by either event loop."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import uvloop

from tests.support.tls_proxy import Certificates, make_certificates
from tests.support.waiting import until
from workers.http_server.acceptor import Acceptor
from workers.http_server.connections import Closable, ConnectionBounds, Connections
from workers.http_server.pacer import ParseTurns, Parsing
from workers.http_server.tls import Tls, TlsFiles

MANY, NUM_PEERS = 10_000, 8

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

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)
        self.turns.append(self.turn())


@contextmanager
def accepting(
    certificates: Certificates, made: list[Heard], host: str = "127.0.0.1", turns: ParseTurns | None = None
) -> Iterator[int]:
    def new() -> Heard:
        made.append(Heard())
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
