"""TLS connections from their first packet to their last: how fast they begin, and how long they may take to end."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import pytest

from tests.support.tls_proxy import Certificates, make_certificates
from tests.support.waiting import until
from workers.http_server import acceptor
from workers.http_server.acceptor import HELLO_TURNS, Acceptor, HelloTurns
from workers.http_server.connections import Closable, ConnectionBounds, Connections
from workers.http_server.tls import Tls, TlsFiles

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


async def test_of_a_crowds_handshakes_one_begins_every_few_turns(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's part takes a millisecond or more of the event loop: a crowd's were done in one turn."""
    loop, turn, over = asyncio.get_running_loop(), 0, False
    begun, accept = Counter[int](), loop.connect_accepted_socket

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if not over:
            loop.call_soon(count_turns)

    async def counted(*given: Any, **more: Any) -> Any:
        begun[turn] += 1
        return await accept(*given, **more)

    with accepting(certificates, []) as port, ExitStack() as held:
        monkeypatch.setattr(loop, "connect_accepted_socket", counted)
        for _ in range(NUM_PEERS):
            peer = held.enter_context(socket.create_connection(("127.0.0.1", port)))
            peer.sendall(hello(certificates))
        count_turns()
        await until(lambda: begun.total() == NUM_PEERS, 10.0, "all have begun")
        over = True
    assert set(begun.values()) == {1}
    turns = sorted(begun)
    assert min(later - one for one, later in pairwise(turns)) >= HELLO_TURNS


async def test_handshakes_begin_address_by_address() -> None:
    """A crowd from one address kept everybody else out for ten seconds, without a key: each began after all of it."""
    turns, order = HelloTurns(), list[str]()

    async def begin(address: str) -> None:
        await turns.enter(address)
        order.append(address)
        await asyncio.sleep(0)
        turns.leave()

    async with asyncio.TaskGroup() as group:
        for address in ("crowd",) * 50 + ("a", "b", "a"):
            group.create_task(begin(address))
    assert order[:7] == ["crowd", "crowd", "a", "b", "crowd", "a", "crowd"]
    assert len(order) == 53


async def test_handshakes_that_give_up_in_line_hold_up_nobody() -> None:
    turns = HelloTurns()
    await turns.enter("first")
    gone = [asyncio.create_task(turns.enter(f"gone-{number}")) for number in range(3)]
    follows = asyncio.create_task(turns.enter("follows"))
    await asyncio.sleep(0)
    for one in gone[:2]:
        one.cancel()
    turns.leave()  # before they know that they were cancelled
    gone[2].cancel()  # its turn has just come
    await asyncio.wait_for(follows, 1.0)
    turns.leave()
    await asyncio.wait_for(turns.enter("last"), 1.0)


async def test_who_reads_nothing_keeps_a_closed_connection_for_a_while_only(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "GOODBYE_S", 0.5)
    ended = list[float]()
    context = ssl.create_default_context(cafile=str(certificates.ca))
    with accepting(certificates, ended) as port, socket.create_connection(("127.0.0.1", port)) as peer:
        talking = await asyncio.to_thread(context.wrap_socket, peer, server_hostname="127.0.0.1")
        began = time.monotonic()
        await until(lambda: bool(ended), 10.0, "it is let go")
        assert 0.3 < ended[0] - began < 3.0
        talking.close()
