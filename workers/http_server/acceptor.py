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
import mmap
import os
import resource
import socket
import ssl
import tempfile
from collections.abc import Callable, Coroutine
from typing import IO, Protocol, cast

from workers.http_server.connections import Closable, Connections, Verdict
from workers.http_server.pacer import ParseTurns
from workers.http_server.records import TlsShare
from workers.http_server.tls import Tls
from workers.http_server.tls_transport import BEYOND_HANDSHAKE_S, HANDSHAKE_S, TlsTransport

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
AHEAD = 4
"""Number of connections that a process may have more than any other that accepts on the same socket."""
BEHIND_S, PATIENCE_S = 0.001, 0.02
"""Seconds for which a process that has more leaves new connections to the others, and seconds after which it accepts
some nevertheless: a process that does not run accepts none."""
PAUSE_S = 0.05
"""Seconds between two checks whether there is room for a connection."""
NUM_BYTES = 8
"""Bytes of one process's number in `SharedCounts`."""
GONE_FOR_GOOD = 1 << 40
"""More connections than any process has."""
NUM_TURNS = 3
"""Iterations of the event loop to wait before connections are closed to make room."""
TELL_S = 60.0
"""Minimum seconds between two log lines about missing descriptors."""

GONE = (BlockingIOError, InterruptedError, ConnectionAbortedError)
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = logging.getLogger(__name__)


class SharedCounts:
    """The numbers of open connections of all processes that accept on one socket, in a file that each of them maps."""

    def __init__(self, descriptor: int, number: int, num_processes: int) -> None:
        """`number`: of this process among them, from 0. Raises OSError and ValueError if the file is none of these."""
        self._counts = memoryview(mmap.mmap(descriptor, NUM_BYTES * num_processes)).cast("q")
        self._number = number

    def note(self, num_open: int) -> int:
        """Note this process's connections, and return how many it has more than the one that has fewest."""
        self._counts[self._number] = num_open
        return num_open - min(self._counts)

    def leave(self) -> None:
        """Note that this process accepts no more connections, so that the others do not wait for it."""
        self._counts[self._number] = GONE_FOR_GOOD

    @staticmethod
    def new_file(num_processes: int) -> IO[bytes]:
        """Return a new file for so many processes, in memory where the system has such files. They inherit its
        descriptor. Raises OSError."""
        file = _file_in_memory() or tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - its owner closes it
        try:
            # Written, so that it has its blocks: a process that writes to a mapped page without one is killed (SIGBUS)
            # when the disk is full.
            if file.write(bytes(NUM_BYTES * num_processes)) < NUM_BYTES * num_processes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except BaseException:
            file.close()
            raise
        return file


def _file_in_memory() -> IO[bytes] | None:
    """Return a new file that lies on no disk; None where the system has none."""
    if not hasattr(os, "memfd_create"):
        return None
    with contextlib.suppress(OSError):  # a kernel may lack what the C library has
        return open(os.memfd_create("paddock-counts"), "r+b", buffering=0)
    return None


class Handshake:
    """A connection whose TLS handshake is under way: it counts as a connection of its address from its first packet."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def make_room(self) -> None:
        # The transport, which is not made known before the handshake's end, sees the end of its socket and gives up.
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def cut_unfinished(self) -> None:
        self.make_room()


class Shaken(Protocol):
    """A protocol that learns the handshake by which its connection is counted already."""

    handshake: Closable | None


class Acceptor:
    """Accepts on one listening socket, from `start` to `close`. Stands in for an `asyncio.Server`."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        protocol: Callable[[], asyncio.Protocol],
        counts: SharedCounts | None = None,
        tls: Tls | None = None,
        turns: ParseTurns | None = None,
    ) -> None:
        """`counts`: how many connections the processes have that accept on the same socket; None: this one alone does.
        `tls`: None: connections are not encrypted. `turns`: in which TLS is decrypted; None: they are its own.

        The system would give nearly all connections to the process that it wakes first."""
        self._listener = listener
        self._counts = counts
        self._tls = tls
        self._behind_until: float | None = None
        """The loop's time until which others should accept the connections that wait now; None: no others need to."""
        self._connections = connections
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._spare = SpareDescriptors()
        self._opening: set[asyncio.Task[None]] = set()
        self._handshakes: set[Handshake] = set()
        self._tls_share = TlsShare(turns)
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
        if self._counts is not None:
            self._counts.leave()
        self._loop.remove_reader(self._listener)
        for timer in (self._pause, self._refilling):
            if timer is not None:
                timer.cancel()
        self._spare.close()

    async def wait_closed(self) -> None:
        for handshake in self._handshakes:
            handshake.make_room()  # those of peers who say nothing would last
        if self._opening:
            await asyncio.wait(self._opening)

    def _accept(self) -> None:
        at_once = AT_ONCE if self._counts is None else self._share(self._counts)
        if not at_once:
            self._loop.remove_reader(self._listener)
            self._pause = self._loop.call_later(BEHIND_S, self._go_on)
            return
        for _ in range(at_once):
            if self._connections.full:
                self._rest()
                return
            try:
                connection, address = self._listener.accept()
            except GONE:
                self._behind_until = None
                return
            except OSError as error:
                if error.errno in NO_ROOM and self._freed(error):
                    continue
                self._rest()
                return
            connection.setblocking(False)
            if self._tls is None:
                self._connections.num_coming += 1
                self._begin(self._open(connection))
            else:
                self._shake_hands(connection, str(address[0]) if address else "", self._tls)

    def _share(self, counts: SharedCounts) -> int:
        """Return how many connections to accept now; 0: other processes, which have fewer, should accept them."""
        more = counts.note(self._connections.num_open + self._connections.num_coming)
        if more < AHEAD:
            self._behind_until = None
            return AHEAD - more
        now = self._loop.time()
        if self._behind_until is None:
            self._behind_until = now + PATIENCE_S
        return AHEAD if now >= self._behind_until else 0

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _begin(self, opening: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(opening)
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _shake_hands(self, connection: socket.socket, address: str, tls: Tls) -> None:
        """Begin the handshake of a connection, which counts from now on, or close it if there are too many."""
        handshake = Handshake(connection)
        self._connections.num_coming += 1
        verdict = self._connections.came(handshake, address, connection.fileno())
        if verdict is Verdict.REFUSED:
            connection.close()
            return
        limit_s = HANDSHAKE_S if verdict is Verdict.WITHIN else BEYOND_HANDSHAKE_S
        self._begin(self._open_encrypted(connection, handshake, tls.context, limit_s))

    async def _open_encrypted(
        self, connection: socket.socket, handshake: Handshake, context: ssl.SSLContext, limit_s: float
    ) -> None:
        """Open a connection. Return when its handshake is complete, or the connection over before that."""

        def made() -> asyncio.Protocol:
            protocol = self._protocol()
            cast(Shaken, protocol).handshake = handshake
            return protocol

        address = self._connections.address_of(handshake)
        transport = TlsTransport(made, context, address, self._tls_share, limit_s)
        self._handshakes.add(handshake)
        try:
            await self._loop.connect_accepted_socket(lambda: transport, connection)
            await transport.handshake_ended
        except OSError:
            connection.close()  # the peer was gone already
        finally:
            self._handshakes.discard(handshake)
            self._connections.gone(handshake)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError:
            self._connections.num_coming -= 1
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
