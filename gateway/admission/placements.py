"""Counts the calls that this gateway has placed at each worker lately, or is about to: news can't include them yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

REMEMBERED_S = 2.0
"""Seconds for which moves are kept. News are younger, except in fleets of thousands of workers."""


@dataclass(slots=True)
class _Lately:
    """The recent moves at one worker, in order: time.monotonic(), 1 placed or -1 given back, predicted prefill ms."""

    moves: deque[tuple[float, int, float]] = field(default_factory=deque)
    num_aimed: int = 0
    """Calls that wait for this worker."""
    aimed_ms: float = 0.0


class Placements:
    """The recent placements of one model. `gateway.routing.rank` calls `since` some dozens of times per call."""

    def __init__(self) -> None:
        self._workers: dict[str, _Lately] = {}
        self._aims: dict[str, tuple[str, float]] = {}
        """Ticket -> the worker that suits it best, and its predicted prefill there, ms."""

    def placed(self, worker: str, now: float, prefill_ms: float) -> None:
        self._note(worker, now, 1, prefill_ms)

    def given_back(self, worker: str, now: float) -> None:
        self._note(worker, now, -1, 0.0)

    def aim(self, ticket: str, worker: str, prefill_ms: float) -> None:
        """Note that a call waits, best of all for this worker: later calls count it as before them there."""
        self.forget(ticket)
        self._aims[ticket] = worker, prefill_ms
        lately = self._of(worker)
        lately.num_aimed += 1
        lately.aimed_ms += prefill_ms

    def forget(self, ticket: str) -> None:
        """Remove a ticket that waits no more."""
        aim = self._aims.pop(ticket, None)
        if aim is not None:
            lately = self._of(aim[0])
            lately.num_aimed -= 1
            lately.aimed_ms = lately.aimed_ms - aim[1] if lately.num_aimed else 0.0

    def since(self, worker: str, at: float) -> tuple[int, float]:
        """Return the calls placed after `at` less those given back, plus those that wait; and their prefill, ms."""
        lately = self._workers.get(worker)
        if lately is None:
            return 0, 0.0
        num, ms = lately.num_aimed, lately.aimed_ms
        for when, change, prefill_ms in reversed(lately.moves):
            if when <= at:
                break
            num += change
            ms += prefill_ms
        return num, ms

    def tidy(self, now: float) -> None:
        """Forget workers that nothing was sent to lately."""
        for worker, lately in list(self._workers.items()):
            while lately.moves and lately.moves[0][0] < now - REMEMBERED_S:
                lately.moves.popleft()
            if not lately.moves and not lately.num_aimed:
                del self._workers[worker]

    def _of(self, worker: str) -> _Lately:
        return self._workers.setdefault(worker, _Lately())

    def _note(self, worker: str, now: float, change: int, prefill_ms: float) -> None:
        moves = self._of(worker).moves
        moves.append((now, change, prefill_ms))
        while moves[0][0] < now - REMEMBERED_S:
            moves.popleft()
