"""TLS connections from their first packet to their last: how fast they begin, and how long they may take to end."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from select import select

import pytest

from tests.support.tls_peer import IS_THERE, TlsPeer, in_fragments
from tests.support.tls_proxy import Certificates, make_certificates
from tests.support.waiting import until
from workers.http_server import tls_transport
from workers.http_server.acceptor import Acceptor
from workers.http_server.connections import Closable, ConnectionBounds, Connections
from workers.http_server.pacer import ParseTurns
from workers.http_server.records import TlsShare
from workers.http_server.tls import Tls, TlsFiles
from workers.http_server.tls_transport import TlsTransport

pytestmark = pytest.mark.skipif(not IS_THERE, reason="this machine has no OpenSSL library of a known name")

NUM_PEERS = 48
MANY_BYTES = 16 << 20
"""More than the system's buffers take for a peer that does not read."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


class Spoken(asyncio.Protocol):
    """A connection that writes a long answer as soon as it is made, and is closed at once."""

    handshake: Closable | None = None

    def __init__(self, ended: list[float]) -> None:
        self._ended = ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(bytes(MANY_BYTES))
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.append(time.monotonic())


@contextmanager
def accepting(certificates: Certificates, ended: list[float]) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0), backlog=NUM_PEERS) as listener:
        tls = Tls(TlsFiles(certificates.server, certificates.server_key))
        running = Acceptor(listener, Connections(ConnectionBounds.of(1024)), lambda: Spoken(ended), None, tls)
        running.start()
        try:
            yield listener.getsockname()[1]
        finally:
            running.close()


def hello(certificates: Certificates) -> bytes:
    """Return the first packet of a client's handshake."""
    sent = ssl.MemoryBIO()
    talking = ssl.create_default_context(cafile=str(certificates.ca)).wrap_bio(
        ssl.MemoryBIO(), sent, server_hostname="127.0.0.1"
    )
    with pytest.raises(ssl.SSLWantReadError):
        talking.do_handshake()
    return sent.read()


class Noted(ParseTurns):
    """Notes how many times a connection began something in each turn of the event loop."""

    def __init__(self, turn: Callable[[], int]) -> None:
        super().__init__()
        self.begun = Counter[int]()
        self._of_loop = turn

    def spent(self, seconds: float) -> None:
        self.begun[self._of_loop()] += 1
        super().spent(seconds)


@pytest.mark.parametrize("is_second_half", [False, True], ids=["hellos", "finished"])
async def test_of_a_crowds_handshakes_a_few_go_on_in_a_turn(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, is_second_half: bool
) -> None:
    """The server's part takes a millisecond or more of the event loop: a crowd's were done in one turn. So were their
    second halves, where all had waited with them."""
    loop, turn, over = asyncio.get_running_loop(), 0, False

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if not over:
            loop.call_soon(count_turns)

    noted = Noted(lambda: turn)
    share = TlsShare()
    share.hello_turns = noted
    opened = list[asyncio.Protocol]()

    def made() -> asyncio.Protocol:
        opened.append(asyncio.Protocol())
        return opened[-1]

    context = TlsFiles(certificates.server, certificates.server_key).context()
    server = await loop.create_server(lambda: TlsTransport(made, context, "crowd", share), "127.0.0.1", 0)
    with ExitStack() as held:
        address = server.sockets[0].getsockname()
        talking = []
        for _ in range(NUM_PEERS):
            peer = held.enter_context(TlsPeer())
            peer.shake_hands()
            talking.append((peer, held.enter_context(socket.create_connection(address))))
        if is_second_half:
            for peer, connection in talking:
                connection.sendall(peer.encrypted())
            await until(lambda: noted.begun.total() == NUM_PEERS, 10.0, "all have begun")
            for peer, connection in talking:
                peer.received(connection.recv(1 << 16))
                assert peer.shake_hands()
            noted.begun.clear()
        for peer, connection in talking:
            connection.sendall(peer.encrypted())
        count_turns()
        await until(lambda: noted.begun.total() == NUM_PEERS, 10.0, "all were read")
        over = True
        assert len(opened) == (NUM_PEERS if is_second_half else 0)
        server.close()
    assert max(noted.begun.values()) < NUM_PEERS // 2


async def test_handshakes_begin_address_by_address(certificates: Certificates) -> None:
    """A crowd from one address kept everybody else out for ten seconds, without a key: each began after all of it."""
    with accepting(certificates, []) as port, ExitStack() as held:

        def come(address: str) -> socket.socket:
            peer = socket.create_connection(("127.0.0.1", port), source_address=(address, 0))
            peer.sendall(hello(certificates))
            peer.setblocking(False)
            return held.enter_context(peer)

        crowd = [come("127.0.0.1") for _ in range(NUM_PEERS)]
        alone = come("127.0.0.2")
        while not select([alone], [], [], 0)[0]:  # noqa: ASYNC110 - the answer of this loop's own server
            await asyncio.sleep(0)
        num_answered = len(select(crowd, [], [], 0)[0])
        assert num_answered < NUM_PEERS * 3 // 4
        await until(lambda: len(select(crowd, [], [], 0)[0]) == NUM_PEERS, 10.0, "all are answered")


class Stuck(ParseTurns):
    """A line that does not go on."""

    def may_parse(self) -> bool:
        return False

    def _turn(self) -> None:
        pass


async def test_handshakes_that_give_up_in_line_hold_up_nobody(certificates: Certificates) -> None:
    """Each took its turn as ever, a millisecond for nobody."""
    loop, share, waiting = asyncio.get_running_loop(), TlsShare(), list[TlsTransport]()
    share.hello_turns = stuck = Stuck()
    context = TlsFiles(certificates.server, certificates.server_key).context()

    def new() -> TlsTransport:
        waiting.append(TlsTransport(asyncio.Protocol, context, "crowd", share))
        return waiting[-1]

    server = await loop.create_server(new, "127.0.0.1", 0)
    with socket.create_connection(server.sockets[0].getsockname()) as peer:
        peer.sendall(hello(certificates))
        await until(lambda: bool(waiting) and stuck.waits(waiting[0]), 5.0, "it waits")
    await until(lambda: not stuck.waits(waiting[0]), 5.0, "it has left the line")
    assert waiting[0].handshake_ended.done()
    server.close()


@pytest.mark.parametrize(("size", "is_taken"), [(100, True), (1, False)])
async def test_a_hello_in_fragments_is_taken_unless_they_are_absurd(
    certificates: Certificates, size: int, is_taken: bool
) -> None:
    with accepting(certificates, []) as port, TlsPeer() as peer:
        peer.shake_hands()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.settimeout(5)
            connection.sendall(in_fragments(peer.encrypted(), size))
            try:
                answer = await asyncio.to_thread(connection.recv, 1 << 16)
            except ConnectionError:
                answer = b""
    assert bool(answer) == is_taken


async def test_who_reads_nothing_keeps_a_closed_connection_for_a_while_only(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_transport, "GOODBYE_S", 0.5)
    ended = list[float]()
    context = ssl.create_default_context(cafile=str(certificates.ca))
    with accepting(certificates, ended) as port, socket.create_connection(("127.0.0.1", port)) as peer:
        talking = await asyncio.to_thread(context.wrap_socket, peer, server_hostname="127.0.0.1")
        began = time.monotonic()
        await until(lambda: bool(ended), 10.0, "it is let go")
        assert 0.3 < ended[0] - began < 3.0
        talking.close()
