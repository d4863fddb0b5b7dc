"""What goes through TLS arrives as it was sent, a connection that pauses holds little, and ends are heard of."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
import uvloop

from tests.support.tls_peer import IS_THERE, TlsPeer
from tests.support.tls_proxy import Certificates, make_certificates
from tests.support.waiting import until
from workers.http_server import records
from workers.http_server.records import FEW_BYTES, FIRST_BYTES, TlsShare
from workers.http_server.tls import TlsFiles
from workers.http_server.tls_transport import TlsTransport

pytestmark = pytest.mark.skipif(not IS_THERE, reason="this machine has no OpenSSL library of a known name")

MANY_BYTES, NUM_TINY = 3 << 20, 8_000

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
    """A connection that notes what happens to it."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.received = b""
        self.has_peer_ended = self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data

    def eof_received(self) -> bool:
        self.has_peer_ended = True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True


class Echoing(Heard):
    """A connection that sends back what comes, and pauses while its peer does not read."""

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)

    def pause_writing(self) -> None:
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.transport.resume_reading()


class Pausing(Heard):
    """A connection that pauses as soon as something has come."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.transport.pause_reading()


class Answering(Heard):
    """A connection that goes on when its peer has ended."""

    def eof_received(self) -> bool:
        super().eof_received()
        asyncio.get_running_loop().call_later(0.1, self._answer)
        return True

    def _answer(self) -> None:
        self.transport.write(b"answer")
        self.transport.close()
        self.transport.write(b"nothing")


class Serving:
    """A server whose connections share what can be looked at."""

    def __init__(self) -> None:
        self.share = TlsShare()
        self.made: list[Heard] = []
        self.port = 0


@asynccontextmanager
async def serving(certificates: Certificates, kind: type[Heard]) -> AsyncIterator[Serving]:
    there = Serving()
    context = TlsFiles(certificates.server, certificates.server_key).context()

    def made() -> Heard:
        there.made.append(kind())
        return there.made[-1]

    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: TlsTransport(made, context, "peer", there.share), "127.0.0.1", 0)
    there.port = server.sockets[0].getsockname()[1]
    try:
        yield there
    finally:
        server.close()
        for one in there.made:
            one.transport.abort()
        await until(lambda: all(one.is_lost for one in there.made), 5.0, "all are over")


def connected(certificates: Certificates, port: int, version: ssl.TLSVersion | None = None) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(certificates.ca))
    if version is not None:
        context.maximum_version = version
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(30)
    return context.wrap_socket(connection, server_hostname="127.0.0.1")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_what_is_sent_comes_back(certificates: Certificates, run: Run, version: ssl.TLSVersion) -> None:
    chance = random.Random(7)
    sent = chance.randbytes(MANY_BYTES)

    def send(peer: ssl.SSLSocket) -> None:
        at = 0
        while at < len(sent):
            size = chance.choice([1, 100, 5_000, 16_384, 70_000, 300_000])
            peer.sendall(sent[at : at + size])
            at += size

    def receive(peer: ssl.SSLSocket) -> bytes:
        pieces, size = [], 0
        while size < len(sent) and (piece := peer.recv(1 << 16)):
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)

    async def talk() -> None:
        async with serving(certificates, Echoing) as there:
            with await asyncio.to_thread(connected, certificates, there.port, version) as peer:
                sending = asyncio.create_task(asyncio.to_thread(send, peer))
                await asyncio.sleep(0.2)  # the peer does not read at first
                assert await asyncio.to_thread(receive, peer) == sent
                await sending
            await until(lambda: there.made[0].is_lost, 5.0, "it is over")
            assert there.share.num_waiting_bytes == 0

    run(talk())


@asynccontextmanager
async def paused(certificates: Certificates, count: int) -> AsyncIterator[Serving]:
    """Have so many connections pause after their first bytes, each with a peer that goes on sending."""
    with ExitStack() as held:
        async with serving(certificates, Pausing) as there:
            for _ in range(count):
                peer = held.enter_context(TlsPeer())
                connection = held.enter_context(socket.create_connection(("127.0.0.1", there.port)))
                await asyncio.to_thread(peer.shake_hands_by, connection)
                peer.say(*[b"x"] * NUM_TINY)
                connection.setblocking(False)
                with suppress(BlockingIOError):
                    connection.send(peer.encrypted())
            await until(lambda: all(one.received for one in there.made) and len(there.made) == count, 10.0, "all pause")
            await asyncio.sleep(0.1)
            yield there


def test_a_connection_that_pauses_holds_little(certificates: Certificates, run: Run) -> None:
    """Up to 0.5 MiB were received and kept for each, and counted nowhere."""

    async def hold() -> None:
        async with paused(certificates, 1) as there:
            first = there.made[0]
            assert 0 < there.share.num_waiting_bytes <= FIRST_BYTES
            num_received = len(first.received)
            first.transport.resume_reading()
            await until(lambda: len(first.received) > num_received, 5.0, "it goes on")
            first.transport.abort()
            await until(lambda: first.is_lost, 5.0, "it is over")
            assert there.share.num_waiting_bytes == 0

    run(hold())


def test_many_connections_that_pause_hold_little_together(
    certificates: Certificates, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, count = 2 * FIRST_BYTES, 24
    monkeypatch.setattr(records, "MAX_WAITING_BYTES", most)

    async def hold() -> None:
        async with paused(certificates, count) as there:
            assert most // 2 < there.share.num_waiting_bytes <= most + FIRST_BYTES + count * FEW_BYTES

    run(hold())


@pytest.mark.parametrize("is_told", [True, False])
def test_the_end_of_a_peer_is_the_end_of_the_connection(certificates: Certificates, run: Run, is_told: bool) -> None:
    async def end() -> None:
        async with serving(certificates, Heard) as there:
            peer = await asyncio.to_thread(connected, certificates, there.port)
            peer.sendall(b"abc")
            if is_told:
                await asyncio.to_thread(peer.unwrap)
            else:
                peer.shutdown(socket.SHUT_WR)
            await until(lambda: there.made[0].is_lost, 5.0, "it is over")
            assert there.made[0].has_peer_ended
            assert there.made[0].received == b"abc"
            peer.close()

    run(end())


def test_a_peer_that_has_ended_may_still_be_answered(certificates: Certificates, run: Run) -> None:
    async def end() -> None:
        async with serving(certificates, Answering) as there:
            with TlsPeer() as peer, socket.create_connection(("127.0.0.1", there.port)) as connection:
                connection.settimeout(5)
                await asyncio.to_thread(peer.shake_hands_by, connection)
                peer.end()
                connection.sendall(peer.encrypted())
                while data := await asyncio.to_thread(connection.recv, 1 << 16):
                    peer.received(data)
                assert peer.content() == b"answer"
            await until(lambda: there.made[0].is_lost, 5.0, "it is over")

    run(end())


def test_who_sends_what_is_no_record_is_told_so(certificates: Certificates, run: Run) -> None:
    async def break_off() -> None:
        async with serving(certificates, Heard) as there:
            with TlsPeer() as peer, socket.create_connection(("127.0.0.1", there.port)) as connection:
                connection.settimeout(5)
                await asyncio.to_thread(peer.shake_hands_by, connection)
                await until(lambda: bool(there.made), 5.0, "it is open")
                connection.setblocking(False)
                with suppress(BlockingIOError):
                    connection.recv(1 << 16)  # tickets
                connection.settimeout(5)
                connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                with suppress(ConnectionError):
                    assert len(await asyncio.to_thread(connection.recv, 1 << 16)) > 0, "an alert"
            await until(lambda: there.made[0].is_lost, 5.0, "it is over")
            assert not there.made[0].received

    run(break_off())
