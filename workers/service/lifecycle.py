"""The state of a worker: whether it serves, drains or ends, and whether it has the memory for calls.

start -> listening -> registered -> serving --signal--> draining --idle or bound--> cut -> flushed -> gone
                                        |`--/health/drain--^                         ^
                                        |`--/v1/leave--> leaving --idle--------------|
                                        `-----engine crashed-------------------------'

A worker that is reserved (SIGUSR1) serves on, but gateways send it no new calls until it is released (SIGUSR2).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import time
from collections.abc import Callable

from workers.process.limits import can_take
from workers.process.signals import is_hurrying
from workers.protocol.events import Failure, FailureCode

PROBE_BYTES = 64 << 20
"""Bytes that must be free before a worker that ran out of memory gets calls again. One call may need that much at once
to hold its prompt in several forms, on top of the memory that the worker took when it started."""
LOOK_S = 1.0

log = logging.getLogger(__name__)


def is_shortage(error: BaseException | None) -> bool:
    """Return whether the error means that memory has run out: in Python itself, at a fork or for a new thread."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_shortage, error.exceptions))
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "start new thread" in str(error))


class Shortage:
    """Remembers that a worker is short of memory, so that gateways send it no calls until it has enough again. Use
    it on one event loop."""

    def __init__(self, can_take: Callable[[int], bool] = can_take) -> None:
        self._can_take = can_take
        self._listeners: list[Callable[[], None]] = []
        self._short = False
        self._look_at = 0.0

    def listen(self, begins: Callable[[], None]) -> None:
        """Call `begins` each time the worker starts to run short of memory."""
        self._listeners.append(begins)

    def note(self) -> Failure:
        """Record that an allocation has failed; return the failure for the call that needed it."""
        self._look_at = time.monotonic() + LOOK_S
        if not self._short:
            self._short = True
            log.error("out of memory: no new calls until %d MiB can be had; see what limits it", PROBE_BYTES >> 20)
            for begins in self._listeners:
                begins()
        message = "the worker is out of memory, which is not the request's fault; send it again"
        return Failure(FailureCode.OUT_OF_MEMORY, message)

    @property
    def lasts(self) -> bool:
        """Whether the worker is still short of memory, and so gets no calls; checked again every `LOOK_S` seconds."""
        if self._short and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            if self._can_take(PROBE_BYTES):
                self._short = False
                log.warning("there is memory again: new calls are taken")
        return self._short


logger = logging.getLogger(__name__)


class Lifecycle:
    """The state of one worker process. Build it on the running loop, and use it on that loop unless a method says
    otherwise."""

    def __init__(self) -> None:
        self.draining = False
        """Whether no new calls are taken."""
        self.reserved = False
        """Whether gateways are told to send no new calls. Those that come all the same are taken."""
        self.drains_since = 0.0
        """time.monotonic() at which the worker began to drain."""
        self.leaving = asyncio.Event()
        """Set once the process is to end when its last call is done, so that another one takes its place."""
        self.stopping = asyncio.Event()
        """Set once the process is to end."""
        self.at_once = asyncio.Event()
        """Set once the process is not to wait for running calls either."""
        self.crash: BaseException | None = None
        self.shortage = Shortage()
        """The shortage of memory; while it lasts, gateways place no calls here."""
        self._loop = asyncio.get_running_loop()

    def drain(self) -> bool:
        """Take no new calls from now on; running calls go on. Return False if the worker was draining already."""
        if self.draining:
            return False
        self.draining, self.drains_since = True, time.monotonic()
        return True

    def reserve(self, reserved: bool) -> bool:
        """Have gateways send no new calls, or send calls again; return False if that was so already."""
        if self.reserved == reserved:
            return False
        self.reserved = reserved
        return True

    def signalled(self, number: int) -> None:
        """Begin to stop; at the second signal, if it is not SIGHUP, stop without waiting for running calls."""
        if self.stopping.is_set() and is_hurrying(number):
            self.at_once.set()
        self.stopping.set()
        logger.info("%s: stopping%s", signal.Signals(number).name, " at once" if self.at_once.is_set() else "")

    def crashed(self, error: BaseException) -> None:
        """Stop at once, because the engine failed or the events of one of its steps could not be delivered."""
        logger.critical("the engine failed, or a step of it could not be delivered: %s", error, exc_info=error)
        self.crash = error
        self.draining = True
        self.at_once.set()
        self.stopping.set()

    def crashed_in_thread(self, error: BaseException) -> None:
        """Do what `crashed` does; the engine's thread calls this as its last act."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: the process is ending already
            self._loop.call_soon_threadsafe(self.crashed, error)
