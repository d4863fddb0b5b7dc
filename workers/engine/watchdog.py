"""The watchdog: ends a process whose engine hangs in a step, after saying which requests were running.

There are two kinds of hangs, because the second stops every Python thread:

- A step that released the interpreter lock (`llama_decode`) and does not come back is noticed by a thread that looks
  ten times within the bound (`bound_s`). It logs the requests and every thread's stack, and ends the
  process with `Exit.HUNG`.
- Code that keeps the interpreter lock (a sampler, a regular expression) stops that thread too. So each look restarts a
  timer of `faulthandler`, which needs no lock: if no look comes for twice the bound, the timer writes the stacks and
  ends the process with code 1. The ids of the requests are then in the black box only.

The thread counts only the time in which it ran itself, so a process that was frozen for long (SIGSTOP, a paused
container) is not ended for that.
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
"""How many times `bound_s` may pass without a look of the watching thread; then `faulthandler` ends the process."""

FAREWELL_S = 10.0
"""Maximum seconds for the last log lines; then the process ends without them: a hung thread may hold the log's lock."""

STDERR = 2

IDLE = 0.0


class StepAge:
    """Measures how long the running step has run, not counting time in which the process was frozen. Pure."""

    def __init__(self, longest_look_s: float) -> None:
        """`longest_look_s`: maximum seconds counted between two looks; in a longer gap the process was frozen."""
        self._longest_look_s = longest_look_s
        self._began_at = IDLE
        self._looked_at = 0.0
        self._age_s = 0.0

    def look(self, now: float, began_at: float) -> float:
        """Return for how many seconds the running step has run. `began_at`: when it began; `IDLE`: no step runs."""
        age_s = self.glance(now, began_at)
        # In this order, a glance of another thread in between sees too little, not too much.
        self._began_at, self._looked_at = began_at, now
        self._age_s = age_s
        return age_s

    def glance(self, now: float, began_at: float) -> float:
        """Return what `look` would return, without counting as a look. Any thread may call this."""
        if began_at == IDLE:
            return 0.0
        if began_at != self._began_at:
            return min(now - began_at, self._longest_look_s)
        return self._age_s + min(now - self._looked_at, self._longest_look_s)


class Watchdog:
    """Ends the process if a step hangs. Make it before the engine, close it after the engine."""

    def __init__(
        self, bound_s: float = 0.0, black_box: BlackBox | None = None, *, end: Callable[[float], None] | None = None
    ) -> None:
        """`bound_s`: maximum seconds of a step; 0: no bound. `end(age_s)` is called once, if a step takes longer."""
        self.black_box = black_box or BlackBox(None)
        self._bound_s = bound_s
        self._look_s = bound_s / LOOKS_PER_BOUND
        self._end = end or self._bark
        self._began_at = IDLE
        self._age = StepAge(2 * self._look_s)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def step_began(self) -> None:
        self._began_at = time.monotonic()

    def step_ended(self) -> None:
        self._began_at = IDLE

    def hung_s(self) -> float:
        """Return how many seconds the running step is over its bound, or 0. Any thread may call this.

        Time in which the process was frozen does not count: a probe that comes right after it finds no hung step."""
        if self._bound_s <= 0:
            return 0.0
        return max(0.0, self._age.glance(time.monotonic(), self._began_at) - self._bound_s)

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
        try:
            while True:
                faulthandler.dump_traceback_later(STUCK_BOUNDS * self._bound_s, exit=True, file=STDERR)
                if self._stop.wait(self._look_s):
                    return
                age_s = self._age.look(time.monotonic(), self._began_at)
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
