"""Connections that a gateway opens, to workers and to Redis: each asks a silent peer, and ends when nobody answers."""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from gateway.store.client import connect
from tests.integration.relay.scripted import CALL, scripted_worker
from tests.integration.relay.test_relay import REQUEST
from tests.integration.relay.test_trust import following
from tests.support.redis_server import RedisServer
from tests.support.stack import free_port
from workers.process.sockets import UNACKNOWLEDGED_S, tcp_options

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@contextmanager
def ends_towards(port: int) -> Iterator[list[socket.socket]]:
    """This process's ends of connections to a port of this machine, as copies."""
    with ExitStack() as opened:
        found: list[socket.socket] = []
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the folder's own descriptor; a socket that is not connected
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                copy = opened.enter_context(socket.socket(fileno=os.dup(int(name))))
                if copy.getpeername() == ("127.0.0.1", port):
                    found.append(copy)
        yield found


def assert_watched(port: int, number: int) -> None:
    """So many connections lead there, and the kernel looks after each."""
    with ends_towards(port) as ends:
        assert len(ends) == number
        for end in ends:
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == UNACKNOWLEDGED_S * 1000
            for option, value in tcp_options().items():
                assert end.getsockopt(socket.IPPROTO_TCP, option) == value


async def test_a_worker_that_is_silent_on_its_event_stream_is_asked() -> None:
    async with scripted_worker() as worker, following(worker):
        await worker.connected()
        assert_watched(worker.port, 1)


async def test_a_worker_that_is_silent_over_a_call_is_asked() -> None:
    async with (
        scripted_worker() as worker,
        following(worker) as relay,
        relay.start(worker.at, CALL, REQUEST),
    ):
        await worker.submitted(1)
        assert_watched(worker.port, 2)


async def test_a_redis_that_is_silent_is_asked() -> None:
    with RedisServer(port=free_port()) as server:
        async with connect(f"redis://127.0.0.1:{server.port}") as client:
            await client.ping()
            assert_watched(server.port, 1)
