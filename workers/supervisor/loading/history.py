"""Remembers what became of a model's workers on this machine, and when the model is tried again after a failure.

Two things are failures: a load that fails, and a crash loop, in which workers that have loaded die again and again. A
process that is killed while it loads is tried once more at once, for whoever killed it may be gone: the calls that wait
are answered by the next one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.protocol.exits import RESTARTED, Exit, in_words
from workers.protocol.residency import Detail, Why
from workers.residency.picture import NEVER, Failure

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""Seconds after which a model that failed is tried again; each further time it is twice as long."""
JITTER = 0.25
"""Share by which a pause may be longer or shorter, so that machines that failed together don't try together."""
STABLE_S = 300.0
"""A worker that has served for so long was no part of a crash loop."""
CRASHES = 3
"""Number of workers in a row that die within STABLE_S of being loaded which make a crash loop."""
KILLS = 1
"""Number of times in a row that a load which was killed is tried again at once."""
MOST_LINES, MOST_CHARS = 8, 300
"""Last lines of a dead worker's log that are kept, and characters of each."""

_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s:'\"]+/)+")
"""Pattern of a path's folders, but not of an address's."""


def without_folders(text: str) -> str:
    """Return a text with files' names in place of their paths: callers are told of it."""
    return _FOLDERS.sub("", text)


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a worker's process that its supervisor did not ask for."""

    code: int | None
    """Exit code, negative: a signal; None: the process hung, and was killed."""
    complaint: str
    """Why it ended, by its own words."""
    lines: tuple[str, ...] = ()
    """The last lines of its log."""
    is_final: bool = False
    """Whether the process is not started again by itself."""
    found: str = ""
    """What is wrong with the model's files, as was found out after it; empty: nothing was found."""

    @classmethod
    def told(
        cls, code: int | None, complaint: str, lines: Sequence[str] = (), *, is_final: bool = False, found: str = ""
    ) -> Death:
        """Return a death with as much of its log as is kept."""
        return cls(code, complaint, tuple(line[:MOST_CHARS] for line in lines[-MOST_LINES:]), is_final, found)

    @property
    def why(self) -> Why:
        """Why the worker ended, for whoever calls the model: without the folders of this machine."""
        if self.found:
            return Why.of(without_folders(self.found)[:MOST_CHARS])
        complaint = without_folders(self.complaint)[:MOST_CHARS]
        return Why.of(complaint) if self.code is None else Why.of(in_words(self.code), Detail(f": {complaint}"))

    @property
    def is_drain(self) -> bool:
        """Whether an admin had the worker drained, so that its end is no failure of the model."""
        return self.code == Exit.DRAINED

    @property
    def may_pass(self) -> bool:
        """Whether the next process may fare better with nothing else changed: this one did not end by its own will."""
        return self.code is not None and (self.code < 0 or self.code in RESTARTED)


@dataclass(slots=True)
class History:
    """The loads of one model on one machine that failed, and the deaths of its workers."""

    model: str
    was_loaded: bool = False
    left_at: float = NEVER
    failure: Failure | None = None
    """Why it is not tried before a moment, which may be over."""
    refusal: Failure | None = None
    """Why an order to load it was refused a moment ago: its memory was not free."""
    last: Death | None = None
    """The last death, until a worker has been stable."""
    failed_at: float = NEVER
    """When that was."""
    spread: Callable[[float, float], float] = random.uniform
    _num_failed: int = 0
    """Loads that failed since one succeeded."""
    _num_killed: int = 0
    _num_deaths: int = 0
    """Workers in a row that died soon after they were loaded."""
    _asked_at: float = 0.0

    @property
    def num_failures(self) -> int:
        """How often a worker has failed to load, or died, since one was stable."""
        return self._num_failed + self._num_killed + self._num_deaths

    def pending(self, now: float) -> Failure | None:
        """Return why the model is not tried now; None: it may be."""
        return self.failure if self.failure is not None and self.failure.not_before > now else None

    def blocked(self, now: float) -> Failure | None:
        """Return why the model is not to be loaded now, by a failure or because an order was refused; None: it may."""
        found = [each for each in (self.failure, self.refusal) if each is not None and each.not_before > now]
        return max(found, key=lambda each: each.not_before, default=None)

    def note_loaded(self) -> None:
        self.was_loaded, self.failure, self.refusal = True, None, None
        self._num_failed = self._num_killed = 0
        if not self._num_deaths:
            self.last = None

    def note_stable(self) -> None:
        """Note that a worker has served for STABLE_S."""
        self._num_deaths, self.last = 0, None

    def forgive(self) -> None:
        """Forget all failures: an admin wants the model tried now, or its settings have changed."""
        self.failure = self.last = None
        self._num_failed = self._num_killed = self._num_deaths = 0

    def note_asked(self, at: float) -> None:
        """Note that an admin asked for the model, at a moment by the clock of a gateway: each wish is a new try."""
        if at != self._asked_at:
            self._asked_at = at
            self.forgive()

    def failed(self, death: Death, now: float) -> float:
        """Note that a load failed. Return the seconds until the next try."""
        self.last, self.failed_at = death, now
        pause_s = self._pause_s(self._num_failed)
        self._num_failed, self._num_killed = self._num_failed + 1, 0
        self.failure = Failure(self.model, now + pause_s, death.why)
        return pause_s

    def died_loading(self, death: Death, now: float) -> float | None:
        """Note that a process ended while it loaded. Return the seconds until the next try; None: at once."""
        if death.may_pass and self._num_killed < KILLS:
            self.last, self.failed_at, self._num_killed = death, now, self._num_killed + 1
            return None
        return self.failed(death, now)

    def died_serving(self, death: Death, served_s: float, now: float) -> float | None:
        """Note that a process ended after it had served for so long. Return the seconds until the next try; None: at
        once."""
        if served_s >= STABLE_S:
            self.note_stable()
        self.last, self.failed_at, self._num_deaths = death, now, self._num_deaths + 1
        if self._num_deaths < CRASHES:
            return None
        pause_s = self._pause_s(self._num_deaths - CRASHES)
        told = f"crash loop: {self._num_deaths} workers in a row died soon after they were loaded, the last by "
        self.failure = Failure(self.model, now + pause_s, Why.of(told, *death.why.parts))
        return pause_s

    def _pause_s(self, before: int) -> float:
        """Return the seconds to wait after a failure with so many before it in a row."""
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(before, 16), LONGEST_PAUSE_S)
        return pause_s * self.spread(1 - JITTER, 1 + JITTER)
