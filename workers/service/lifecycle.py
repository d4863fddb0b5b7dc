"""Whether a worker serves, drains or ends, and why.

start -> listening -> registered -> serving --signal--> draining --idle or bound--> cut -> flushed -> gone
                                        |`--/health/drain--^                         ^
                                        `-----engine crashed-------------------------'
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time

from workers.service.shortage import Shortage

logger = logging.getLogger(__name__)


class Lifecycle:
    """The state of one worker process. Build it on the running loop; for that loop, where nothing else is said."""

    def __init__(self) -> None:
        self.draining = False
        """Whether no new calls are taken."""
        self.drains_since = 0.0
        """time.monotonic() at which it began to drain."""
        self.stopping = asyncio.Event()
        """Set once the process is to end."""
        self.at_once = asyncio.Event()
        """Set once it is not to wait for running calls either."""
        self.crash: BaseException | None = None
        self.shortage = Shortage()
        """The shortage of memory, while which no calls are to be placed here."""
        self._loop = asyncio.get_running_loop()

    def drain(self) -> bool:
        """Have no new calls taken; those that run go on. Return whether this is news."""
        if self.draining:
            return False
        self.draining, self.drains_since = True, time.monotonic()
        return True

    def signalled(self, number: int) -> None:
        """Stop, at the second signal at once."""
        if self.stopping.is_set():
            self.at_once.set()
        self.stopping.set()
        logger.info("%s: stopping%s", signal.Signals(number).name, " at once" if self.at_once.is_set() else "")

    def crashed(self, error: BaseException) -> None:
        """Stop at once, since the engine failed or a step of it was lost."""
        logger.critical("the engine failed, or a step of it could not be delivered: %s", error, exc_info=error)
        self.crash = error
        self.draining = True
        self.at_once.set()
        self.stopping.set()

    def crashed_in_thread(self, error: BaseException) -> None:
        """Do what `crashed` does; the engine's thread calls this as its last act."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: the process is ending already
            self._loop.call_soon_threadsafe(self.crashed, error)
