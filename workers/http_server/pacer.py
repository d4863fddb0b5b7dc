"""Lets some requests begin in each turn of the event loop. The others take turns by who asks, and what runs already
goes on in between.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from time import thread_time
from typing import Protocol

TURN_S = 0.001
"""Processor time that requests which begin may take of a turn, together."""
FIRST_MOST = 8
"""Requests that begin in a turn, until it is known how long they take."""
MOST = 128


class Waiting(Protocol):
    """A connection on which a request, or more of its head, has come."""

    def begin(self) -> None:
        """Its turn has come."""


class _Lines:
    """Lines that take turns, each by its name."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, OrderedDict[Waiting, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, name: str, waiting: Waiting) -> None:
        self._lines.setdefault(name, OrderedDict())[waiting] = None

    def remove(self, name: str, waiting: Waiting) -> None:
        line = self._lines[name]
        del line[waiting]
        if not line:
            del self._lines[name]

    def next(self) -> Waiting:
        """Return the first of the line whose turn it is. It stays there until it is removed."""
        name, line = next(iter(self._lines.items()))
        self._lines.move_to_end(name)
        return next(iter(line))


class Pacer:
    """The requests of one server that have not begun.

    Each caller that is known has a line, all others one per address. The lines of known callers take turns with each
    other and with all of the others together, so that no crowd without a key stands before somebody who has one.
    """

    def __init__(self) -> None:
        self._known, self._unknown = _Lines(), _Lines()
        self._line_of: dict[Waiting, tuple[_Lines, str]] = {}
        self._most = FIRST_MOST
        self._num_begun = 0
        """In this turn of the loop."""
        self._num_known = 0
        """That began since one of those who are not known did."""
        self._turning = False
        self._spent_s = 0.0
        """By `begin` of those that began in this turn; their tasks run in the next one."""
        self._tasks_at: float | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._line_of)

    def may_begin(self) -> bool:
        """Whether a request may begin at once. Most may: there is room in this turn of the loop, and nobody waits."""
        if self._line_of or self._num_begun >= self._most:
            return False
        self._num_begun += 1
        self._turn_soon()
        return True

    def wait(self, waiting: Waiting, caller: str, address: str) -> None:
        """Have `begin` called when its turn has come, where `may_begin` says no. `caller`: empty, it is not known."""
        if waiting not in self._line_of:
            line = self._line_of[waiting] = (self._known, caller) if caller else (self._unknown, address)
            line[0].add(line[1], waiting)
            self._turn_soon()

    def waits(self, waiting: Waiting) -> bool:
        return waiting in self._line_of

    def leave(self, waiting: Waiting) -> None:
        """It is gone, or begins."""
        line = self._line_of.pop(waiting, None)
        if line is not None:
            line[0].remove(line[1], waiting)

    def _turn_soon(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._learn()
        self._num_begun = 0
        if not self._line_of:
            self._turning = False
            return
        loop = asyncio.get_running_loop()
        # What `begin` leaves to the loop runs between the two calls, so its time is known.
        loop.call_soon(self._mark)
        began_at = thread_time()
        try:
            while self._line_of and self._num_begun < self._most:
                self._num_begun += 1
                waiting = self._next()
                self.leave(waiting)
                waiting.begin()
        finally:
            self._spent_s = thread_time() - began_at
            loop.call_soon(self._turn)

    def _next(self) -> Waiting:
        if len(self._known) and (self._num_known < len(self._known) or not len(self._unknown)):
            self._num_known += 1
            return self._known.next()
        self._num_known = 0
        return self._unknown.next()

    def _mark(self) -> None:
        self._tasks_at = thread_time()

    def _learn(self) -> None:
        """Have half as many begin where the last ones took too long, and one more where they did not."""
        if self._tasks_at is None:
            return
        took_s = self._spent_s + thread_time() - self._tasks_at
        self._tasks_at = None
        if took_s > TURN_S:
            self._most = max(1, self._most // 2)
        elif self._num_begun == self._most < MOST:
            self._most += 1
