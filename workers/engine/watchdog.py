"""The watchdog: ends a process whose engine hangs in a step, after saying which requests were running.

There are two kinds of hangs, because one of them stops every Python thread:

- A step that released the interpreter lock (`llama_decode`) and does not come back is noticed by a thread that looks
  ten times per bound. It logs the requests and every thread's stack, and ends the process with `Exit.HUNG`.
- Code that keeps the interpreter lock (a sampler, a regular expression) stops that thread too. So each look restarts a
  timer of `faulthandler`, which needs no lock: without a look for two bounds, it writes the stacks and ends the process
  with code 1. The ids of the requests are in the black box then.

The thread counts only time that it saw: a process that was frozen (SIGSTOP, a paused container) is not ended by it for
the time in which it did not run.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Self

from workers.process.black_box import BlackBox
from workers.protocol.exits import Exit

log = logging.getLogger("paddock.engine")

LOOKS_PER_BOUND = 10
STUCK_BOUNDS = 2
"""Bounds without any Python code running, after which the timer ends the process."""

FAREWELL_S = 10.0
"""Seconds that the last log lines may take: a thread that hangs may hold the log's own lock."""

STDERR = 2

IDLE = 0.0


class StepAge:
    """The time for which the running step has been seen to run. Pure: the caller brings the clock."""

    def __init__(self, longest_look_s: float) -> None:
        """`longest_look_s`: most that counts between two looks, as the process itself may not have run for longer."""
        self._longest_look_s = longest_look_s
        self._began_at = IDLE
        self._looked_at = 0.0
        self._age_s = 0.0

    def look(self, now: float, began_at: float) -> float:
        """Return the seconds that the running step has run. `began_at` tells steps apart; `IDLE`: none runs."""
        if began_at == IDLE:
            self._age_s = 0.0
        elif began_at != self._began_at:
            self._age_s = min(now - began_at, self._longest_look_s)
        else:
            self._age_s += min(now - self._looked_at, self._longest_look_s)
        self._began_at, self._looked_at = began_at, now
        return self._age_s


class Watchdog:
    """Ends the process if a step hangs. Start it before the engine, close it after. Each mark costs one store."""

    def __init__(
        self, bound_s: float = 0.0, black_box: BlackBox | None = None, *, end: Callable[[float], None] | None = None
    ) -> None:
        """`bound_s`: longest step; 0 watches nothing. `end(age_s)` is called by the watching thread, once."""
        self.black_box = black_box or BlackBox(None)
        self._bound_s = bound_s
        self._end = end or self._bark
        self._began_at = IDLE
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def step_began(self) -> None:
        self._began_at = time.monotonic()

    def step_ended(self) -> None:
        self._began_at = IDLE

    def hung_s(self) -> float:
        """Return the seconds for which the running step has been over its bound; 0 while it is not. For any thread."""
        began_at = self._began_at
        if began_at == IDLE or self._bound_s <= 0:
            return 0.0
        return max(0.0, time.monotonic() - began_at - self._bound_s)

    def start(self) -> None:
        if self._bound_s > 0:
            self._thread.start()

    def close(self) -> None:
        """Stop the watching thread. Calling it again does nothing."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _watch(self) -> None:
        look_s = self._bound_s / LOOKS_PER_BOUND
        age = StepAge(2 * look_s)
        try:
            while True:
                faulthandler.dump_traceback_later(STUCK_BOUNDS * self._bound_s, exit=True, file=STDERR)
                if self._stop.wait(look_s):
                    return
                age_s = age.look(time.monotonic(), self._began_at)
                if age_s >= self._bound_s:
                    self._end(age_s)
                    return
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _bark(self, age_s: float) -> NoReturn:
        faulthandler.dump_traceback_later(FAREWELL_S, exit=True, file=STDERR)
        log.critical(
            "a step of the engine has run for %.1f s and may take %g (step_timeout_s); ending this process, "
            "which was running %s",
            *(age_s, self._bound_s, self.black_box.text()),
        )
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
        os._exit(Exit.HUNG)
