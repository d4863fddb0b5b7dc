"""The placement request of a call (`PlacementRequest`), and the ranking of workers that answers it. Pure.

Slots are numbered over all workers of a model: in the order of worker ids, each worker has as many numbers as slots.
With one worker these are its own slot numbers. They change when workers come and go.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from workers.protocol.heartbeat import Heartbeat
from workers.protocol.pooled import PoolInput, PoolRequest
from workers.protocol.prefixes import NOTHING, Prefix, prefix_of
from workers.protocol.requests import GenerateRequest

ANY = -1


def first_slot_numbers(workers: Sequence[Heartbeat]) -> list[int]:
    """Return the number of each worker's first slot. `workers` must be sorted by id."""
    return list(accumulate((worker.slots for worker in workers), initial=0))[:-1]


def find_slot(number: int, workers: Sequence[Heartbeat]) -> tuple[Heartbeat, int] | None:
    """Return the worker that has the slot of this number, and that slot's number there; None: no worker has it."""
    for first, worker in zip(first_slot_numbers(workers), workers, strict=True):
        if first <= number < first + worker.slots:
            return worker, number - first
    return None


def slot_number(worker_id: str, slot: int, workers: Sequence[Heartbeat]) -> int:
    """Return the number of a worker's slot over all `workers`; ANY if the worker is not among them."""
    for first, worker in zip(first_slot_numbers(workers), workers, strict=True):
        if worker.worker == worker_id:
            return first + slot
    return ANY


MAX_BIDS = 8
"""Most workers that a ticket has bids for."""
MAX_LEFT_OUT = 64
MAX_OTHERS = 3
"""Most workers in a `Ranking.summary` beside the one that the call went to."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The facts of one call that its placement depends on."""

    prefix: Prefix = NOTHING
    """The prompt's prefix hashes; none if it may not use the cache. `num_bytes` is right in any case."""
    max_tokens: int | None = None
    """Most tokens of the answer; None: no bound is named."""
    adapters: frozenset[str] = frozenset()
    """LoRA adapters that the call names."""
    slot: int = ANY
    """Number of the slot that the call asks for, counted over the model's workers."""


ANYWHERE = PlacementRequest()


def placement_request_of(request: GenerateRequest, tenant: str, hashes: Mapping[str, str]) -> PlacementRequest:
    """Return the placement request of a generation. `hashes`: adapter -> SHA-256, of those that the model has."""
    prefix = prefix_of(request, tenant, hashes)
    return PlacementRequest(
        prefix if request.cache_prompt else Prefix((), (), prefix.num_bytes),
        request.max_tokens,
        frozenset(use.name for use in request.adapters),
        request.slot,
    )


def placement_request_of_pooled(request: PoolRequest) -> PlacementRequest:
    """Return the placement request of embeddings or a ranking: nothing is cached, and there is no decode."""
    num_bytes = sum(map(_num_bytes, request.inputs))
    return PlacementRequest(Prefix((), (), num_bytes + len(request.query or "") * len(request.inputs)), max_tokens=0)


TOKEN_BYTES = 4


def _num_bytes(one: PoolInput) -> int:
    if isinstance(one, str):
        return len(one)
    if isinstance(one, array):
        return TOKEN_BYTES * len(one)
    return sum(len(part) if isinstance(part, str) else TOKEN_BYTES for part in one)


class Bid(msgspec.Struct, frozen=True):
    """The predicted cost of one worker for a call. A msgspec struct, since nine of them are made for each call."""

    worker: str
    wait_ms: float
    """Predicted time until it has a slot there and its prefill begins."""
    cost_ms: float
    """Predicted time from then to its first token: loading adapters, and prefill of what is not cached there."""
    kv_tokens: int
    """KV cells that it is predicted to take: the uncached part of the prompt, and the answer."""
    cached_tokens: int
    """Estimated tokens of the prompt that are cached there."""
    burden_ms: float = 0.0
    """Cost of its prefill for other calls: those that wait behind it, and those whose cached prompts it evicts."""

    @property
    def weight_ms(self) -> float:
        """The cost to all calls, once it has a slot."""
        return self.cost_ms + self.burden_ms

    @property
    def total_ms(self) -> float:
        """The figure by which workers are compared."""
        return self.wait_ms + self.weight_ms

    @property
    def figures(self) -> str:
        """The costs in one line, for people."""
        return (
            f"wait_ms={self.wait_ms:.0f} cost_ms={self.cost_ms:.0f} burden_ms={self.burden_ms:.0f} "
            f"cached={self.cached_tokens}"
        )


@dataclass(frozen=True, slots=True)
class Ranking:
    """The workers for a call, best first. No slot is taken yet."""

    bids: tuple[Bid, ...]
    """Bids of the best workers, at most MAX_BIDS, by `total_ms`; none if no worker meets the requirements."""
    elsewhere: Bid | None = None
    """The least bid of all other suitable workers; None: there is no other, or too many are not suitable."""
    left_out: frozenset[str] = frozenset()
    """Workers that `elsewhere` does not stand for, since they are not suitable; at most MAX_LEFT_OUT."""
    charge: float = 0.0
    """Tokens that the call is predicted to take, for fair shares: uncached prompt and answer on the best worker; the
    whole prompt and the answer where there is no worker.
    """
    hold_ms: float = 0.0
    """Predicted time of the decode, after the first token."""

    @property
    def take(self) -> tuple[Bid, ...]:
        """The workers to take at once if they have a slot: waiting for the best one would be no better."""
        if not self.bids:
            return ()
        least = self.bids[0].total_ms
        return tuple(bid for bid in self.bids if bid.weight_ms <= least)

    def bid_for(self, worker: str) -> Bid | None:
        """Return the bid for a worker, `elsewhere` for one without its own; None: there is neither."""
        return next((bid for bid in self.bids if bid.worker == worker), self.elsewhere)

    def summary(self, worker: str) -> str:
        """Return the costs of the worker that was chosen, then of others, in one line:
        `w1 wait_ms=0 cost_ms=41 burden_ms=40 cached=512; w2 ...`.
        """
        chosen = self.bid_for(worker)
        parts = [f"{worker} {chosen.figures}" if chosen else f"{worker} unranked"]
        others = [bid for bid in self.bids if bid.worker != worker]
        return "; ".join(parts + [f"{bid.worker} {bid.figures}" for bid in others[:MAX_OTHERS]])


MOST_URGENT = 8
"""Highest class; classes go from its negative to it."""


def priority_class(priority: int) -> int:
    """Return the class of a request's priority in the queue: calls of a higher class go first, whatever the shares of
    teams are. Both count up with urgency; priorities beyond the highest or lowest class belong to it.
    """
    return max(-MOST_URGENT, min(MOST_URGENT, priority))
