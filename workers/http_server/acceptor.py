"""Accepts connections from a listening socket while there is room; the others wait in the system's queue.

uvloop accepts whatever waits, and resets it where no descriptor is left (libuv's way with EMFILE). Here the limit of
descriptors is raised as far as the system allows, and a few are held in reserve: with them a connection that comes when
there are no others is refused with an answer, and probes are answered.
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
"""Descriptors that are enough for anybody; some systems say that there is no limit."""
NUM_SPARE = 16


def raise_limit() -> int:
    """Let this process open as many files as it may; return their number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    with contextlib.suppress(OSError, ValueError):  # macOS has a bound of its own below what it tells
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class SpareDescriptors:
    """Descriptors that are held open, so that one can be given up when there are no others."""

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
        """Open missing spare descriptors, as many as the system gives; return whether none is missing now."""
        with contextlib.suppress(OSError):
            while len(self._open) < self._count:
                self._open.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        return len(self._open) == self._count

    def close(self) -> None:
        while self.give_up():
            pass


AT_ONCE = 16
"""Most connections accepted in one turn of the event loop."""
PAUSE_S = 0.05
"""Seconds until it is checked again whether there is room."""
NUM_TURNS = 3
"""Turns of the event loop before connections are closed to make room."""
TELL_S = 60.0
"""Seconds between two log lines about missing descriptors."""

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
            connection.close()  # it was gone already

    def _freed(self, error: OSError) -> bool:
        """Close a descriptor of the reserve; return whether there was one, so that a connection can be accepted."""
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
        """Leave new connections in the system's queue for a moment."""
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(PAUSE_S, self._look, NUM_TURNS)

    def _look(self, num_turns: int) -> None:
        # A loop that is late runs its timers before it reads: a peer that has sent a request must not count as idle.
        if num_turns:
            self._pause = self._loop.call_soon(self._look, num_turns - 1)
            return
        self._pause = None
        self._connections.make_room()
        self._loop.add_reader(self._listener, self._accept)
