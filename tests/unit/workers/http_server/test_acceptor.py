"""Processes that accept on one socket share the connections out, whichever of them the system wakes first."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.support.waiting import until
from workers.http_server.acceptor import AHEAD, NUM_BYTES, Acceptor, SharedCounts
from workers.http_server.connections import ConnectionBounds, Connections

NUM_PEERS = 40

ON_A_FULL_DISK = """
import os, resource
from workers.http_server.acceptor import SharedCounts
vars(os).pop("memfd_create", None)
resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8))  # room for one process, and for what `tempfile` tries a folder with
try:
    SharedCounts.new_file(2)
except OSError as error:
    print(error.strerror)
"""


class Accepted(asyncio.Protocol):
    """A connection that only counts."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._connections.came(self, "127.0.0.1", transport.get_extra_info("socket").fileno())  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.gone(self)  # type: ignore[arg-type]


@asynccontextmanager
async def processes(number: int) -> AsyncIterator[tuple[int, list[Acceptor], list[Connections]]]:
    """So many acceptors on one port, as processes have them; they are not started."""
    with SharedCounts.new_file(number) as file, socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as held:
        acceptors, connections = [], []
        for place in range(number):
            known = Connections(ConnectionBounds.of(1024))
            shared = held.enter_context(listener.dup())
            counts = SharedCounts(file.fileno(), place, number)
            acceptors.append(Acceptor(shared, known, lambda known=known: Accepted(known), counts))  # type: ignore[misc]
            connections.append(known)
        yield listener.getsockname()[1], acceptors, connections
        for acceptor in acceptors:
            acceptor.close()


async def connect(port: int, number: int, held: ExitStack) -> None:
    for _ in range(number):
        peer = held.enter_context(socket.socket())
        peer.setblocking(False)
        await asyncio.get_running_loop().sock_connect(peer, ("127.0.0.1", port))


def test_the_counts_lie_on_no_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A full `/tmp` killed each gateway at its first connection (SIGBUS: the mapped page had no block)."""
    if not hasattr(os, "memfd_create"):
        pytest.skip("this system has no files in memory")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with SharedCounts.new_file(2) as file:
        assert os.fstat(file.fileno()).st_blocks
        counts = [SharedCounts(file.fileno(), number, 2) for number in range(2)]
        assert [counts[0].note(3), counts[1].note(1), counts[0].note(3)] == [3, 0, 2]


def test_counts_on_a_disk_have_their_block_before_they_are_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with SharedCounts.new_file(2) as file:
        found = os.fstat(file.fileno())
        assert found.st_blocks * 512 >= found.st_size == 2 * NUM_BYTES


def test_counts_that_the_disk_does_not_take_are_said_at_the_start() -> None:
    done = subprocess.run([sys.executable, "-c", ON_A_FULL_DISK], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "No space left on device", done.stderr


@pytest.mark.parametrize("number", [2, 3])
async def test_connections_are_shared_out_evenly(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.http_server.acceptor.PATIENCE_S", 60.0)  # all of them run on one busy event loop
    async with processes(number) as (port, acceptors, connections):
        for acceptor in acceptors:
            acceptor.start()
        with ExitStack() as held:
            await connect(port, NUM_PEERS, held)
            await until(lambda: sum(one.num_open for one in connections) == NUM_PEERS, 5.0, "all are accepted")
            counts = [one.num_open for one in connections]
            assert max(counts) - min(counts) <= AHEAD
        await until(lambda: not sum(one.num_open for one in connections), 5.0, "all are gone")


async def test_a_process_that_does_not_run_holds_nobody_up_for_long() -> None:
    async with processes(2) as (port, acceptors, connections):
        acceptors[0].start()
        with ExitStack() as held:
            await connect(port, NUM_PEERS, held)
            await until(lambda: connections[0].num_open == NUM_PEERS, 5.0, "it accepts those of the other as well")


async def test_a_process_that_leaves_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.http_server.acceptor.PATIENCE_S", 60.0)
    async with processes(2) as (port, acceptors, connections):
        for acceptor in acceptors:
            acceptor.start()
        acceptors[1].close()
        with ExitStack() as held:
            await connect(port, NUM_PEERS, held)
            await until(lambda: connections[0].num_open == NUM_PEERS, 5.0, "it accepts all")
