"""Accepts connections from a listening socket while there is room; other connections wait in the system's queue.

uvloop accepts every connection that waits, and resets it if no file descriptor is left (libuv's handling of EMFILE).
This module raises the limit of descriptors as far as the system allows, and holds a few in reserve. With one of those,
a connection that comes when no other descriptor is left still gets an answer: a probe's, or a refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import resource
import socket
from collections.abc import Callable

from workers.http_server.connections import Connections

MOST = 1 << 20
"""Maximum number of descriptors to ask for: enough for anybody, and some systems name no limit."""
NUM_SPARE = 16


def raise_limit() -> int:
    """Raise this process's limit of open files as far as is allowed, to `MOST` at most; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    with contextlib.suppress(OSError, ValueError):  # macOS allows less than the limit that it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class SpareDescriptors:
    """Holds descriptors open in reserve, so that one can be closed for a connection when no other is free."""

    def __init__(self, count: int = NUM_SPARE) -> None:
        self._count = count
        self._open: list[int] = []
        self.refill()

    def give_up(self) -> bool:
        """Close one spare descriptor; return False if none is left."""
        if not self._open:
            return False
        os.close(self._open.pop())
        return True

    def refill(self) -> bool:
        """Reopen the descriptors that were given up, as far as the system allows; return whether all are open now."""
        with contextlib.suppress(OSError):
            while len(self._open) < self._count:
                self._open.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        return len(self._open) == self._count

    def close(self) -> None:
        while self.give_up():
            pass


AT_ONCE = 16
"""Maximum number of connections accepted in one iteration of the event loop; the rest wait for the next."""
PAUSE_S = 0.05
"""Seconds between two checks whether there is room for a connection."""
NUM_TURNS = 3
"""Iterations of the event loop to wait before connections are closed to make room."""
TELL_S = 60.0
"""Minimum seconds between two log lines about missing descriptors."""

GONE = (BlockingIOError, InterruptedError, ConnectionAbortedError)
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = logging.getLogger(__name__)


class Acceptor:
    """Accepts on one listening socket, from `start` to `close`. Stands in for an `asyncio.Server`."""

    def __init__(
        self, listener: socket.socket, connections: Connections, protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        self._listener = listener
        self._connections = connections
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._spare = SpareDescriptors()
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.Handle | None = None
        self._refilling: asyncio.TimerHandle | None = None
        self._told_at = -math.inf
        self._closed = False

    def start(self) -> None:
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Accept no more. Open connections stay open."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._listener)
        for timer in (self._pause, self._refilling):
            if timer is not None:
                timer.cancel()
        self._spare.close()

    async def wait_closed(self) -> None:
        if self._opening:
            await asyncio.wait(self._opening)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            if self._connections.full:
                self._rest()
                return
            try:
                connection, _ = self._listener.accept()
            except GONE:
                return
            except OSError as error:
                if error.errno in NO_ROOM and self._freed(error):
                    continue
                self._rest()
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError:
            connection.close()  # the peer was gone already

    def _freed(self, error: OSError) -> bool:
        """Close one spare descriptor, so that a connection can be accepted; return False if none is left."""
        now = self._loop.time()
        if now > self._told_at + TELL_S:
            self._told_at = now
            log.warning("no connection can be taken (%s); raise the limit of open files (ulimit -n)", error.strerror)
        self._connections.starve()
        if self._refilling is None:
            self._refilling = self._loop.call_later(PAUSE_S, self._refill)
        return self._spare.give_up()

    def _refill(self) -> None:
        self._refilling = None if self._spare.refill() else self._loop.call_later(PAUSE_S, self._refill)

    def _rest(self) -> None:
        """Leave new connections in the system's queue for `PAUSE_S`."""
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(PAUSE_S, self._look, NUM_TURNS)

    def _look(self, num_turns: int) -> None:
        # A late loop runs its timers before it reads, so let it read first: a peer that sent a request is not idle.
        if num_turns:
            self._pause = self._loop.call_soon(self._look, num_turns - 1)
            return
        self._pause = None
        self._connections.make_room()
        self._loop.add_reader(self._listener, self._accept)
