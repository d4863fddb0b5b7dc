"""Describes what a call needs of a worker (`PlacementRequest`), and the ranking of workers for it (`Ranking`). Pure.

Slots are numbered over all workers of a model: in the order of worker ids, each worker gets one number per slot. If
there is only one worker, these are its own slot numbers. The numbers change when workers come and go.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import msgspec

from workers.protocol.heartbeat import Heartbeat, Modality, ModelFacts
from workers.protocol.pooled import PoolInput, PoolPrompt, PoolRequest
from workers.protocol.prefixes import NOTHING, Prefix, media_ends, prefix_of
from workers.protocol.requests import GenerateRequest

ANY = -1


def first_slot_numbers(workers: Sequence[Heartbeat]) -> list[int]:
    """Return the number of each worker's first slot. `workers` must be sorted by id."""
    return list(accumulate((worker.slots for worker in workers), initial=0))[:-1]


def find_slot(number: int, workers: Sequence[Heartbeat]) -> tuple[Heartbeat, int] | None:
    """Return the worker that has the slot of this number, and the slot's number on that worker; None if no worker has
    it."""
    for first, worker in zip(first_slot_numbers(workers), workers, strict=True):
        if first <= number < first + worker.slots:
            return worker, number - first
    return None


def slot_number(worker_id: str, slot: int, workers: Sequence[Heartbeat]) -> int:
    """Return the number of a worker's slot, counted over all `workers`; ANY if the worker is not among them."""
    for first, worker in zip(first_slot_numbers(workers), workers, strict=True):
        if worker.worker == worker_id:
            return first + slot
    return ANY


MAX_BIDS = 8
"""Maximum number of workers for which a ticket carries separate bids; one more bid stands for all other workers."""
MAX_LEFT_OUT = 64
MAX_OTHERS = 3
"""Maximum number of workers in a `Ranking.summary` besides the one that the call went to; the rest are left out."""


MODALITY_OF: dict[str, Modality] = {"picture": "image", "sound": "audio"}
"""Kind of a `Medium` -> the name of that kind of input in `ModelFacts.inputs`."""


class PlacedMedium(NamedTuple):
    """A picture or a sound of a prompt."""

    kind: str
    end: int
    """Number of the prompt's bytes, as `Prefix.ends` counts them: a worker that has so many cached has its cells."""


def cells_of(kind: str, facts: ModelFacts) -> int:
    """Return about how many KV cells a picture or a sound takes."""
    return facts.picture_cells if kind == "picture" else facts.sound_cells


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The properties of one call that its placement depends on."""

    prefix: Prefix = NOTHING
    """The prompt's prefix hashes; none if the call may not use the cache. `num_bytes` is always the prompt's size."""
    max_tokens: int | None = None
    """Maximum number of tokens of the answer; None: the call sets no limit."""
    adapters: frozenset[str] = frozenset()
    """LoRA adapters that the call names."""
    slot: int = ANY
    """Number of the slot that the call asks for, counted over the model's workers."""
    media: tuple[PlacedMedium, ...] = ()
    """The prompt's pictures and sounds, in their order."""


ANYWHERE = PlacementRequest()


def placement_request_of(request: GenerateRequest, tenant: str, hashes: Mapping[str, str]) -> PlacementRequest:
    """Return the placement request of a generation. `hashes`: adapter -> SHA-256, for the model's adapters."""
    prefix = prefix_of(request, tenant, hashes)
    return PlacementRequest(
        prefix if request.cache_prompt else Prefix((), (), prefix.num_bytes),
        request.max_tokens,
        frozenset(use.name for use in request.adapters),
        request.slot,
        tuple(PlacedMedium(one.kind, end) for one, end in zip(request.media, media_ends(request), strict=True)),
    )


def placement_request_of_pooled(request: PoolRequest) -> PlacementRequest:
    """Return the placement request of a call for embeddings or reranking: nothing is cached or decoded."""
    num_bytes = sum(map(_num_bytes, request.inputs)) + len(request.query or "") * len(request.inputs)
    media = tuple(PlacedMedium(one.kind, num_bytes + 1) for one in request.media)  # no worker has them cached
    return PlacementRequest(Prefix((), (), num_bytes), max_tokens=0, media=media)


TOKEN_BYTES = 4


def _num_bytes(one: PoolInput) -> int:
    if isinstance(one, str):
        return len(one)
    if isinstance(one, PoolPrompt):
        return len(one.text) + sum(len(message.content or "") for message in one.messages)
    if isinstance(one, array):
        return TOKEN_BYTES * len(one)
    return sum(len(part) if isinstance(part, str) else TOKEN_BYTES for part in one)


class Bid(msgspec.Struct, frozen=True):
    """The predicted cost of a call at one worker. A msgspec struct for speed: nine are made for each call."""

    worker: str
    wait_ms: float
    """Predicted time until the call has a slot at the worker and its prefill begins."""
    cost_ms: float
    """Predicted time from the end of the wait to the first token: adapters are loaded, uncached tokens prefilled."""
    kv_tokens: int
    """KV cells that the call is predicted to take: those of the uncached part of the prompt, and of the answer."""
    cached_tokens: int
    """Estimated tokens of the prompt that the worker has cached."""
    burden_ms: float = 0.0
    """The prefill's cost to other calls: those that wait behind it, and those whose cached prompts it evicts."""

    @property
    def weight_ms(self) -> float:
        """The total cost without the wait: `cost_ms` to the call itself, plus `burden_ms` to other calls."""
        return self.cost_ms + self.burden_ms

    @property
    def total_ms(self) -> float:
        """The figure by which workers are compared."""
        return self.wait_ms + self.weight_ms

    @property
    def figures(self) -> str:
        """The costs in one line of text, for people."""
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
    """The lowest bid of all other suitable workers, which stands for them all; None: there are no others, or more than
    MAX_LEFT_OUT workers are unsuitable."""
    left_out: frozenset[str] = frozenset()
    """Workers that `elsewhere` does not stand for, because they are not suitable; at most MAX_LEFT_OUT."""
    charge: float = 0.0
    """Predicted tokens that the call uses of its team's fair share: those of the answer, plus those of the prompt that
    the best worker has not cached; if there is no worker, those of the whole prompt."""
    hold_ms: float = 0.0
    """Predicted time of the decode, after the first token."""

    @property
    def take(self) -> tuple[Bid, ...]:
        """The bids of the workers to take at once if they have a free slot, because waiting for the best worker would
        be no better."""
        if not self.bids:
            return ()
        least = self.bids[0].total_ms
        return tuple(bid for bid in self.bids if bid.weight_ms <= least)

    def bid_for(self, worker: str) -> Bid | None:
        """Return the bid for a worker, or `elsewhere` if it has no bid of its own; None if there is neither."""
        return next((bid for bid in self.bids if bid.worker == worker), self.elsewhere)

    def summary(self, worker: str) -> str:
        """Return the costs of the worker that was chosen, then of others, in one line:
        `w1 wait_ms=0 cost_ms=41 burden_ms=40 cached=512; w2 ...`."""
        chosen = self.bid_for(worker)
        parts = [f"{worker} {chosen.figures}" if chosen else f"{worker} unranked"]
        others = [bid for bid in self.bids if bid.worker != worker]
        return "; ".join(parts + [f"{bid.worker} {bid.figures}" for bid in others[:MAX_OTHERS]])


MOST_URGENT = 8
"""The highest priority class; classes go from -MOST_URGENT to MOST_URGENT."""


def priority_class(priority: int) -> int:
    """Return the class of a request's priority in the queue: calls of a higher class go first, whatever the shares of
    teams are. A higher number is more urgent, for priorities and classes alike; a priority beyond the highest or lowest
    class is put into that class."""
    return max(-MOST_URGENT, min(MOST_URGENT, priority))
