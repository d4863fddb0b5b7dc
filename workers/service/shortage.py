"""Notes that a worker has too little memory, so that gateways send it no calls until it has enough again."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable

from workers.process.memory import can_take
from workers.protocol.events import Failure, FailureCode

PROBE_BYTES = 64 << 20
"""Bytes that a call may need at once, beside the memory taken at the start: its prompt in several forms."""
LOOK_S = 1.0

log = logging.getLogger(__name__)


def is_shortage(error: BaseException | None) -> bool:
    """Return whether the error means that there is no more memory: for Python, a fork or a thread."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_shortage, error.exceptions))
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "start new thread" in str(error))


class Shortage:
    """The shortage of one worker process. For one event loop."""

    def __init__(self, can_take: Callable[[int], bool] = can_take) -> None:
        self._can_take = can_take
        self._listeners: list[Callable[[], None]] = []
        self._short = False
        self._look_at = 0.0

    def listen(self, begins: Callable[[], None]) -> None:
        """Have `begins` called whenever the first allocation of a shortage has failed."""
        self._listeners.append(begins)

    def note(self) -> Failure:
        """Note that an allocation has failed; return the failure for its call."""
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
        """Whether no call should be placed here; checks again every `LOOK_S`."""
        if self._short and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            if self._can_take(PROBE_BYTES):
                self._short = False
                log.warning("there is memory again: new calls are taken")
        return self._short
