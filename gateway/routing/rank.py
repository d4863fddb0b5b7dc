"""Finds a pool's best workers for a call: the least cost in milliseconds (`cost`) of those that would do (`needs`).

Not every worker is looked at. A worker's cost depends on how much of the prompt it has cached and on when it is ready.
So it is enough to go from the deepest prefix hash (head) of the prompt to the shallowest, at each through its holders,
then through all, the readiest first, until those that follow can't be among the best. Pure; Redis decides what is free.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from math import inf
from operator import attrgetter

from gateway.routing.cost import BURDEN, Estimate, Needs, Price, Recent, needs_of
from gateway.routing.placement import MAX_BIDS, MAX_LEFT_OUT, Ask, Ranking
from gateway.routing.pool import Pool
from gateway.routing.worker_state import Standing

__all__ = ["Recent", "rank"]

WANTED = MAX_BIDS + 1
"""Workers that are looked for: the best, and one more that stands for all others."""
EVALUATED = 2 * WANTED
"""Most holders of one head that are looked at one by one."""
MAX_WALKS = 8
"""Most heads with more holders than that for which the readiest are looked for; a prompt rarely has more than two."""
SPARSE = 16
"""Where at most one worker of so many holds a head, its holders are sorted, rather than all workers gone through."""
ROUNDED_MS = 0.001

_ready_at = attrgetter("ready_at")
_total_ms = attrgetter("total_ms")


def rank(
    ask: Ask,
    pool: Pool,
    recent: Recent,
    *,
    now: float,
    queued: int = 0,
    avoid: frozenset[str] = frozenset(),
    turn: int = 0,
) -> Ranking:
    """Rank workers for a call. `now`: seconds by the clock of `heard_at`. `queued`: calls before it in the queue.
    `avoid`: workers that have failed it, used only where no other would do. Equals take turns as `turn` counts up.
    """
    price = Price(ask, pool, recent, now, queued)
    for needs in needs_of(ask, pool, avoid):
        best = _Search(ask, pool, price, needs, now, turn).best()
        if best:
            return _ranking(best, price, pool, needs)
    # No worker serves yet: the call is queued with the tokens and the time that it will take.
    answer_tokens = price.answer_tokens
    return Ranking((), charge=price.uncached_tokens(0) + answer_tokens, hold_ms=answer_tokens * pool.typical.decode_ms)


def _ranking(found: list[Estimate], price: Price, pool: Pool, needs: Needs) -> Ranking:
    best = found[0]
    left_out = needs.unmet(pool, MAX_LEFT_OUT) if len(found) > MAX_BIDS else None
    decode_ms = best.standing.beat.load.decode_ms or pool.typical.decode_ms
    return Ranking(
        bids=tuple(price.bid(estimate) for estimate in found[:MAX_BIDS]),
        elsewhere=None if left_out is None else price.bid(found[MAX_BIDS]),
        left_out=left_out or frozenset(),
        charge=price.uncached_tokens(best.cached_bytes) + price.answer_tokens,
        hold_ms=price.answer_tokens * decode_ms,
    )


class _Search:
    """One search for the best workers of a call."""

    def __init__(self, ask: Ask, pool: Pool, price: Price, needs: Needs, now: float, turn: int) -> None:
        self._prefix = ask.prefix
        self._pool = pool
        self._price = price
        self._needs = None if needs.met_by_all(pool) else needs
        self._now = now
        self._turn = turn
        self._found: list[Estimate] = []
        self._seen: dict[int, float] = {}
        """Worker number -> its `total_ms`, of those that were looked at; infinite where it can't be among the best."""
        self._best: list[float] = []
        """`total_ms` of the best that were found, at most WANTED, least first."""
        self._bar = inf
        """`total_ms` that a worker must stay below to be among the best."""

    def best(self) -> list[Estimate]:
        """Return the best workers, best first, at most WANTED."""
        self._through_heads()
        for speed in self._pool.classes:
            self._walk(speed.by_readiness, speed.prefill_ms, 0)
        self._found.sort(key=_total_ms)
        return self._found[:WANTED]

    def _through_heads(self) -> None:
        """Look at the holders of the prompt's heads, each worker once, with the deepest head that it has."""
        fastest_ms = self._pool.classes[0].prefill_ms if self._pool.classes else 0.0
        walks, ends = 0, self._prefix.ends
        for place, holders in self._pool.heads.levels(self._prefix.digests):
            end = ends[place]
            if self._price.uncached_tokens(end) * fastest_ms * (1 + BURDEN) >= self._bar:
                return
            if isinstance(holders, int):
                self._look_all((holders,), end)
            elif isinstance(holders, tuple):
                self._look_all(holders, end)
            elif not self._look_few(holders, end) and walks < MAX_WALKS:
                self._look_many(holders, end)
                walks += 1

    def _look_few(self, holders: set[int], end: int) -> bool:
        """Look at the holders that are new. Return False, and look at none, if they are too many."""
        if len(holders) > SPARSE * EVALUATED:
            return False
        new = holders.difference(self._seen)
        if len(new) <= EVALUATED:
            self._look_all(sorted(new), end)
        return len(new) <= EVALUATED

    def _look_all(self, numbers: Sequence[int], end: int) -> None:
        first = self._turn % len(numbers) if len(numbers) > 1 else 0
        weighed = self._price.uncached_tokens(end) * (1 + BURDEN)
        for number in (*numbers[first:], *numbers[:first]) if first else numbers:
            there = self._numbered(number)
            if there is None or number in self._seen:
                continue
            if self._price.least_wait_ms(there) + weighed * there.prefill_ms >= self._bar:
                self._seen[number] = inf
            elif self._needs is None or not self._needs.lacking(there):
                self._look(there, end)

    def _look_many(self, holders: set[int], end: int) -> None:
        if len(holders) * SPARSE <= len(self._pool.numbered):
            there = [standing for number in holders if (standing := self._numbered(number)) is not None]
            there.sort(key=_ready_at)
            self._walk(there, 0.0, end)
            return
        for speed in self._pool.classes:
            self._walk(speed.by_readiness, speed.prefill_ms, end, holders)

    def _walk(
        self, ready: Sequence[Standing], least_prefill_ms: float, end: int, among: set[int] | None = None
    ) -> None:
        """Look at the best of `ready`, sorted by readiness, that are in `among`; they have `end` bytes cached."""
        price, seen, needs = self._price, self._seen, self._needs
        weighed = price.uncached_tokens(end) * (1 + BURDEN)
        least_ms = weighed * least_prefill_ms
        if least_ms >= self._bar:
            return
        # Workers that cost no more than by their news alone: those that follow them are no better.
        calm = 0
        for there in self._in_turn(ready):
            number = there.number
            if among is not None and number not in among:
                continue
            wait_ms = price.least_wait_ms(there)
            if wait_ms + least_ms >= self._bar:
                return
            if number not in seen:
                if needs is not None and needs.lacking(there):
                    continue
                self._look(there, end)
            calm += seen[number] <= wait_ms + weighed * there.prefill_ms + price.queue_ms + ROUNDED_MS
            if calm >= WANTED:
                return

    def _in_turn(self, ready: Sequence[Standing]) -> Iterator[Standing]:
        """Yield the workers by readiness; those that are ready now begin with another one each turn."""
        ready_now = bisect_right(ready, self._now, key=_ready_at)
        first = self._turn % ready_now if ready_now else 0
        for number in range(first, ready_now):
            yield ready[number]
        for number in range(first):
            yield ready[number]
        for number in range(ready_now, len(ready)):
            yield ready[number]

    def _look(self, there: Standing, end: int) -> None:
        estimate = self._price.at(there, end)
        total_ms = estimate.total_ms
        self._seen[there.number] = total_ms
        if total_ms < self._bar:
            self._found.append(estimate)
            insort(self._best, total_ms)
            if len(self._best) >= WANTED:
                del self._best[WANTED:]
                self._bar = self._best[-1]

    def _numbered(self, number: int) -> Standing | None:
        """Return the worker of a number; None where it serves no more, or joined after the pool was made."""
        return self._pool.numbered[number] if number < len(self._pool.numbered) else None
