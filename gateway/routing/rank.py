"""Which workers of a pool are best for a call: one cost in milliseconds (`cost`), over those that would do (`needs`).

Not every worker is looked at. A worker's cost depends on what it has cached of the prompt and on when it is ready, so
it is enough to go from the deepest head of the prompt to the shallowest, at each through its holders, and at last
through all, the readiest first, until those that follow can't be among the best. Pure; Redis decides what is free.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from math import inf
from operator import attrgetter

from gateway.routing.ask import MAX_BIDS, Ask, Ranking
from gateway.routing.cost import Estimate, Price, Recent
from gateway.routing.needs import Needs, needs_of
from gateway.routing.pool import Pool
from gateway.routing.standing import Standing

__all__ = ["Recent", "rank"]

WANTED = MAX_BIDS + 1
"""The best, and one more that stands for all others."""
EVALUATED = 2 * WANTED
"""Holders of one head, so many of which are looked at one by one."""
MAX_WALKS = 8
"""Heads with more holders than that, for which the readiest are looked for; a prompt rarely has more than two."""
SPARSE = 16
"""Where one worker of so many holds a head, or fewer, its holders are sorted, rather than all workers gone through."""

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
    """`now`: seconds, by the clock of the pool's `heard_at`. `queued`: calls in the model's line before this one.
    `avoid`: workers that have failed it, used only where no other would do. Equals take turns as `turn` counts up.
    """
    price = Price(ask, pool, recent, now, queued)
    for needs in needs_of(ask, pool, avoid):
        found = _Search(ask, pool, price, needs, now, turn).found()
        if found:
            return _ranking(found, price, pool)
    return Ranking(())


def _ranking(found: list[Estimate], price: Price, pool: Pool) -> Ranking:
    best = found[0]
    decode_ms = best.standing.beat.load.decode_ms or pool.typical.decode_ms
    return Ranking(
        bids=tuple(price.bid(estimate) for estimate in found[:MAX_BIDS]),
        elsewhere=price.bid(found[MAX_BIDS]) if len(found) > MAX_BIDS else None,
        charge=price.tokens(price.num_bytes - best.cached_bytes) + price.answer_tokens,
        hold_ms=price.answer_tokens * decode_ms,
    )


class _Search:
    """The best workers for one call."""

    def __init__(self, ask: Ask, pool: Pool, price: Price, needs: Needs, now: float, turn: int) -> None:
        self._prefix = ask.prefix
        self._pool = pool
        self._price = price
        self._needs = needs
        self._now = now
        self._turn = turn
        self._estimates: list[Estimate] = []
        self._seen: set[int] = set()
        self._best: list[float] = []
        """Totals of the best that were found, at most WANTED, least first."""

    def found(self) -> list[Estimate]:
        """Best first; the first MAX_BIDS + 1 are the best of all, what follows is by the way."""
        self._through_heads()
        for speed in self._pool.classes:
            self._walk(speed.by_readiness, speed.prefill_ms, 0)
        self._estimates.sort(key=_total_ms)
        return self._estimates

    def _through_heads(self) -> None:
        """A worker is looked at once, with the deepest head that it has."""
        holders_of, walks, deeper = self._pool.heads.holders, 0, 0
        for head, end in zip(reversed(self._prefix.digests), reversed(self._prefix.ends), strict=True):
            holders = holders_of(head)
            if isinstance(holders, int):
                self._look_all((holders,), end)
            elif len(holders) > deeper:
                # As many as at the head behind this one: the same.
                deeper = len(holders)
                if isinstance(holders, tuple):
                    self._look_all(holders, end)
                elif not self._look_few(holders, end) and walks < MAX_WALKS:
                    self._look_many(holders, end)
                    walks += 1

    def _look_few(self, holders: set[int], end: int) -> bool:
        """False if too many are new."""
        if len(holders) > SPARSE * EVALUATED:
            return False
        new = holders - self._seen
        if len(new) <= EVALUATED:
            self._look_all(sorted(new), end)
        return len(new) <= EVALUATED

    def _look_all(self, numbers: Sequence[int], end: int) -> None:
        first = self._turn % len(numbers) if len(numbers) > 1 else 0
        for number in (*numbers[first:], *numbers[:first]) if first else numbers:
            there = self._numbered(number)
            if number not in self._seen and there is not None and not self._needs.lacking(there):
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
        """The best of `ready`, which is sorted so, that are in `among`; they have `end` bytes of the prompt cached."""
        least_ms = self._price.tokens(self._price.num_bytes - end) * least_prefill_ms
        # Whose wait is what its news say: those behind it are no better.
        calm = 0
        for there in self._in_turn(ready):
            if among is not None and there.number not in among:
                continue
            base_ms = max(0.0, (there.ready_at - self._now) * 1000)
            if base_ms + least_ms >= self._worst():
                return
            if there.number in self._seen:
                calm += 1
            elif not self._needs.lacking(there):
                calm += self._look(there, end).wait_ms <= base_ms
            if calm >= WANTED:
                return

    def _in_turn(self, ready: Sequence[Standing]) -> Iterator[Standing]:
        """By readiness; those that are ready now begin with another one each turn."""
        ready_now = bisect_right(ready, self._now, key=_ready_at)
        first = self._turn % ready_now if ready_now else 0
        for number in range(first, ready_now):
            yield ready[number]
        for number in range(first):
            yield ready[number]
        for number in range(ready_now, len(ready)):
            yield ready[number]

    def _look(self, there: Standing, end: int) -> Estimate:
        estimate = self._price.at(there, end)
        self._seen.add(there.number)
        self._estimates.append(estimate)
        if len(self._best) < WANTED:
            insort(self._best, estimate.total_ms)
        elif estimate.total_ms < self._best[-1]:
            self._best.pop()
            insort(self._best, estimate.total_ms)
        return estimate

    def _worst(self) -> float:
        """What a worker must come below to matter."""
        return self._best[-1] if len(self._best) == WANTED else inf

    def _numbered(self, number: int) -> Standing | None:
        """None where it serves no more, or joined after the pool was drawn."""
        return self._pool.numbered[number] if number < len(self._pool.numbered) else None
