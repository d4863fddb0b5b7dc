"""Finds a pool's best workers for a call: those whose cost in milliseconds (`cost`) is least.

Not every worker is looked at. A worker's cost depends on how much of the prompt it has cached and on when it is ready.
So the search goes from the prompt's deepest prefix hash to its shallowest, and looks at each hash's holders: the
workers that have this prefix cached. Then it goes through all workers, the readiest first, until the rest can't be
among the best. Pure: Redis decides which slots are free.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from math import inf
from operator import attrgetter

from gateway.routing.cost import BURDEN, CostModel, Estimate, RecentPlacements, Requirements, requirements_of
from gateway.routing.placement import MAX_BIDS, MAX_LEFT_OUT, PlacementRequest, Ranking
from gateway.routing.pool import Pool
from gateway.routing.worker_state import WorkerState

WANTED = MAX_BIDS + 1
"""Number of workers to find: the MAX_BIDS best, and one more whose cost stands for all other workers."""
EVALUATED = 2 * WANTED
"""If at most this many holders of a prefix hash are left to be looked at, all are; else only those ready soonest."""
MAX_WALKS = 8
"""Maximum number of searches among holders, per prompt. Each prefix hash with more than EVALUATED holders needs a
search of its own; once the maximum is reached, such hashes are skipped. A prompt rarely has more than 2 of them."""
SPARSE = 16
"""If at most one in this many workers holds a prefix hash, its holders are sorted by readiness; otherwise the search
goes through all workers, which are sorted already."""
ROUNDED_MS = 0.001

_ready_at = attrgetter("ready_at")
_total_ms = attrgetter("total_ms")


def rank(
    request: PlacementRequest,
    pool: Pool,
    recent: RecentPlacements,
    *,
    now: float,
    queued: int = 0,
    avoid: frozenset[str] = frozenset(),
    turn: int = 0,
) -> Ranking:
    """Rank the workers of a pool for a call. `now`: seconds, by the clock of `WorkerState.heard_at`. `queued`: number
    of calls that are in the queue before this call. `avoid`: workers that have failed this call, used only if no other
    worker would do. `turn`: a counter by which workers of equal cost take turns."""
    costs = CostModel(request, pool, recent, now, queued)
    for requirements in requirements_of(request, pool, avoid):
        best = _Search(request, pool, costs, requirements, now, turn).best()
        if best:
            return _ranking(best, costs, pool, requirements)
    # No worker serves yet: the call is queued with the tokens and the time that it will take.
    answer_tokens = costs.answer_tokens
    return Ranking((), charge=costs.uncached_tokens(0) + answer_tokens, hold_ms=answer_tokens * pool.typical.decode_ms)


def _ranking(found: list[Estimate], costs: CostModel, pool: Pool, requirements: Requirements) -> Ranking:
    best = found[0]
    left_out = requirements.unsuitable(pool, MAX_LEFT_OUT) if len(found) > MAX_BIDS else None
    decode_ms = best.worker_state.beat.load.decode_ms or pool.typical.decode_ms
    return Ranking(
        bids=tuple(costs.bid(estimate) for estimate in found[:MAX_BIDS]),
        elsewhere=None if left_out is None else costs.bid(found[MAX_BIDS]),
        left_out=left_out or frozenset(),
        charge=costs.uncached_tokens(best.cached_bytes) + costs.answer_tokens,
        hold_ms=costs.answer_tokens * decode_ms,
    )


class _Search:
    """One search for the best workers of a call."""

    def __init__(
        self, request: PlacementRequest, pool: Pool, costs: CostModel, requirements: Requirements, now: float, turn: int
    ) -> None:
        self._prefix = request.prefix
        self._pool = pool
        self._costs = costs
        self._requirements = None if requirements.met_by_all(pool) else requirements
        self._now = now
        self._turn = turn
        self._found: list[Estimate] = []
        self._seen: dict[int, float] = {}
        """Worker number -> its `total_ms`, for each worker that was looked at; infinite if it can't be among the best.
        """
        self._best: list[float] = []
        """`total_ms` of the best workers found so far, at most WANTED, least first."""
        self._bar = inf
        """A worker must have a lower `total_ms` than this to be among the best."""

    def best(self) -> list[Estimate]:
        """Return the estimates of the best workers, best first, at most WANTED."""
        self._look_at_holders()
        for speed in self._pool.classes:
            self._walk(speed.by_readiness, speed.prefill_ms, 0)
        self._found.sort(key=_total_ms)
        return self._found[:WANTED]

    def _look_at_holders(self) -> None:
        """Look at the workers that have a prefix of the prompt cached: at each once, with its longest one."""
        fastest_ms = self._pool.classes[0].prefill_ms if self._pool.classes else 0.0
        walks, ends = 0, self._prefix.ends
        for place, holders in self._pool.hashes.levels(self._prefix.digests):
            end = ends[place]
            if self._costs.uncached_tokens(end) * fastest_ms * (1 + BURDEN) >= self._bar:
                return
            if isinstance(holders, int):
                self._look_all((holders,), end)
            elif isinstance(holders, tuple):
                self._look_all(holders, end)
            elif not self._look_few(holders, end) and walks < MAX_WALKS:
                self._look_many(holders, end)
                walks += 1

    def _look_few(self, holders: set[int], end: int) -> bool:
        """Look at those `holders` that were not looked at yet. If there are too many, look at none and return False."""
        if len(holders) > SPARSE * EVALUATED:
            return False
        new = holders.difference(self._seen)
        if len(new) <= EVALUATED:
            self._look_all(sorted(new), end)
        return len(new) <= EVALUATED

    def _look_all(self, numbers: Sequence[int], end: int) -> None:
        first = self._turn % len(numbers) if len(numbers) > 1 else 0
        weighed = self._costs.uncached_tokens(end) * (1 + BURDEN)
        for number in (*numbers[first:], *numbers[:first]) if first else numbers:
            state = self._numbered(number)
            if state is None or number in self._seen:
                continue
            if self._costs.least_wait_ms(state) + weighed * state.prefill_ms >= self._bar:
                self._seen[number] = inf
            elif self._requirements is None or not self._requirements.unmet_by(state):
                self._look(state, end)

    def _look_many(self, holders: set[int], end: int) -> None:
        if len(holders) * SPARSE <= len(self._pool.numbered):
            states = [state for number in holders if (state := self._numbered(number)) is not None]
            states.sort(key=_ready_at)
            self._walk(states, 0.0, end)
            return
        for speed in self._pool.classes:
            self._walk(speed.by_readiness, speed.prefill_ms, end, holders)

    def _walk(
        self, ready: Sequence[WorkerState], least_prefill_ms: float, end: int, among: set[int] | None = None
    ) -> None:
        """Look at the workers in `ready`, sorted by readiness, until the rest can't be among the best. `end`: bytes of
        the prompt that these workers have cached. `among`: numbers of those to look at; None: look at all."""
        costs, seen, requirements = self._costs, self._seen, self._requirements
        weighed = costs.uncached_tokens(end) * (1 + BURDEN)
        least_ms = weighed * least_prefill_ms
        if least_ms >= self._bar:
            return
        # Number of workers that cost no more than their news predict. After WANTED of them no later one is better.
        calm = 0
        for state in self._in_turn(ready):
            number = state.number
            if among is not None and number not in among:
                continue
            wait_ms = costs.least_wait_ms(state)
            if wait_ms + least_ms >= self._bar:
                return
            if number not in seen:
                if requirements is not None and requirements.unmet_by(state):
                    continue
                self._look(state, end)
            calm += seen[number] <= wait_ms + weighed * state.prefill_ms + costs.queue_ms + ROUNDED_MS
            if calm >= WANTED:
                return

    def _in_turn(self, ready: Sequence[WorkerState]) -> Iterator[WorkerState]:
        """Yield the workers by readiness. Of those ready now, `turn` decides which comes first."""
        ready_now = bisect_right(ready, self._now, key=_ready_at)
        first = self._turn % ready_now if ready_now else 0
        for number in range(first, ready_now):
            yield ready[number]
        for number in range(first):
            yield ready[number]
        for number in range(ready_now, len(ready)):
            yield ready[number]

    def _look(self, state: WorkerState, end: int) -> None:
        estimate = self._costs.at(state, end)
        total_ms = estimate.total_ms
        self._seen[state.number] = total_ms
        if total_ms < self._bar:
            self._found.append(estimate)
            insort(self._best, total_ms)
            if len(self._best) >= WANTED:
                del self._best[WANTED:]
                self._bar = self._best[-1]

    def _numbered(self, number: int) -> WorkerState | None:
        """Return the worker that has the number; None if it no longer serves, or joined after the pool was made."""
        return self._pool.numbered[number] if number < len(self._pool.numbered) else None
