"""Ranks workers for new and waiting calls, and turns a ranking into offers: a call's predicted cost at each worker."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from gateway.admission.local_queue import LocalQueue, Waiter
from gateway.back_pressure import QueueState
from gateway.registry.fleet import Fleet
from gateway.routing.explain import Explanation, explain
from gateway.routing.placement import Bid, PlacementRequest, Ranking
from gateway.routing.rank import rank
from gateway.store.client import Offer, Offers

NOBODY_ELSE_MS = 60_000.0
"""If only one worker is suitable, its offer assumes another worker that is slower by this many milliseconds."""

ANY_WORKER = Offer("", 0.0, NOBODY_ELSE_MS, 0)
"""The offer in the ticket of a call for which no worker can be ranked now: the first worker that comes will do."""


def offers_of(ranking: Ranking, begin_within_ms: float = 0.0) -> Offers:
    """Return a ranking as the `Offers` of a ticket. `begin_within_ms`: ms left for the first token; 0: no deadline."""
    if not ranking.bids:
        return Offers(elsewhere=ANY_WORKER, begin_within_ms=begin_within_ms, hold_ms=ranking.hold_ms)
    everywhere = [*ranking.bids] if ranking.elsewhere is None else [*ranking.bids, ranking.elsewhere]
    best = sorted(everywhere, key=lambda bid: bid.total_ms)[:2]
    take = ranking.take
    taken = {bid.worker for bid in take}
    return Offers(
        take=tuple(_offer(bid, best) for bid in take),
        more=tuple(_offer(bid, best) for bid in ranking.bids if bid.worker not in taken),
        elsewhere=None if ranking.elsewhere is None else _offer(ranking.elsewhere, best[:1]),
        left_out=ranking.left_out,
        begin_within_ms=begin_within_ms,
        hold_ms=ranking.hold_ms,
    )


def _offer(bid: Bid, best: Sequence[Bid]) -> Offer:
    other = next((other for other in best if other is not bid), None)
    if other is None:
        return Offer(bid.worker, bid.cost_ms, bid.cost_ms + NOBODY_ELSE_MS, bid.kv_tokens, bid.burden_ms, bid.burden_ms)
    other_ms = other.wait_ms + other.cost_ms
    return Offer(bid.worker, bid.cost_ms, other_ms, bid.kv_tokens, bid.burden_ms, other.burden_ms)


MISSED_MS = 1.0
"""A deadline with fewer ms left counts as missed and is ignored: a call that has missed it delays no other call."""


class Ranker:
    """Ranks the workers for calls by the current state of the fleet and this gateway's recent placements."""

    def __init__(self, fleet: Fleet, queue: LocalQueue) -> None:
        self._fleet = fleet
        self._queue = queue
        self._turns = itertools.count()

    def rank(self, model: str, request: PlacementRequest, avoid: frozenset[str], ahead: int | None = None) -> Ranking:
        """Return the ranking of the workers for a call. `ahead`: number of calls before it in the queue; None: all
        waiting calls."""
        return rank(
            request,
            self._fleet.pool(model),
            self._queue.placements(model),
            now=time.monotonic(),
            queued=self._queue.num_queued(model) if ahead is None else ahead,
            avoid=avoid,
            turn=next(self._turns),
        )

    def explain(self, model: str, request: PlacementRequest) -> Explanation:
        """Return the ranking of all workers for a call that would come now, with the reasons."""
        return explain(
            request,
            self._fleet.pool(model),
            self._queue.placements(model),
            now=time.monotonic(),
            queued=self._queue.num_queued(model),
        )

    def offers(self, ranking: Ranking, begin_by: float) -> Offers:
        """Return the offers for a ranking. `begin_by`: the call's deadline for its first token, time.monotonic(); 0: it
        has none. A deadline that has passed is ignored."""
        within_ms = (begin_by - time.monotonic()) * 1000 if begin_by else 0.0
        return offers_of(ranking, within_ms if within_ms >= MISSED_MS else 0.0)

    def refresh(self, waiter: Waiter) -> Offers:
        """Rank the workers for a waiting call anew, and return its new offers."""
        self._queue.placements(waiter.model).remove_waiting(waiter.id)  # the call is not ahead of itself
        ahead = waiter.filed.position - 1 if waiter.filed is not None else None
        if waiter.avoid_now is not None:
            waiter.avoid = waiter.avoid_now()
        waiter.ranking = self.rank(waiter.model, waiter.request, waiter.avoid, ahead)
        waiter.offers = self.offers(waiter.ranking, waiter.begin_by)
        self._queue.note_preferred(waiter)
        return waiter.offers

    def num_slots(self, model: str) -> int:
        """Return the number of slots of all workers that serve the model."""
        return self._fleet.pool(model).slots

    def queue_state(self, model: str, num_waiting: int | None = None) -> QueueState:
        """Return the state of the model's queue. `num_waiting`: number of calls in it; None: the number last read from
        Redis."""
        return self._queue.state(model, self.num_slots(model), num_waiting)
