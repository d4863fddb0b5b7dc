"""The requirements of one call on a worker, and the predicted cost of each worker that meets them. Pure.

The cost of a worker is the milliseconds until the call's first token there, plus the burden on other calls:

    total = wait + cost + burden
    wait  = max(until the call has a slot there, until the prefills before its own are done)
    cost  = prefill + adapters to load x time per adapter
    prefill = prompt tokens that are not cached there x time per prompt token, with pictures and sounds:
              + their cells that are not cached there x time to encode a cell
    burden = BURDEN x prefill

These figures come from the worker's last report (`News`), extrapolated to now, and from the calls that this gateway has
placed there, or that have ended there, since then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from gateway.routing.placement import ANY, MODALITY_OF, Bid, PlacedMedium, PlacementRequest, cells_of, find_slot
from gateway.routing.pool import Pool
from gateway.routing.worker_state import WorkerState
from workers.protocol.heartbeat import PROTOCOL_VERSION, Modality, ModelFacts

BURDEN = 1.0
"""Cost to other calls of prefilling an uncached token, as a multiple of its cost to the call itself.

Other calls wait behind this prefill, and its KV cells evict prefixes that others would have found. At 0, the mean TTFT
of 8 workers on a public trace was 4 to 5 % longer; any factor from 0.5 to 2 is as good as 1 (docs/performance.md)."""


class RecentPlacements(Protocol):
    """Counts this gateway's recent placements that a worker's last report does not include yet."""

    def since(self, worker: str, at: float) -> tuple[int, float]:
        """Return two things about the time since `at`: the number of calls placed at the worker, minus those that
        ended; and the predicted prefill time of the placed calls, in milliseconds."""


class Estimate(msgspec.Struct, frozen=True):
    """The predicted cost of one call at one worker."""

    total_ms: float
    """Total cost with the burden: the figure by which workers are compared."""
    wait_ms: float
    worker_state: WorkerState
    cached_bytes: int
    """Bytes of the prompt that the worker has cached: those of the longest prefix whose hash it has."""
    placed: int
    """Number of calls that this gateway has placed at the worker since the worker's last report, minus those that have
    ended; can be negative."""
    slot_ms: float
    """Time until the call has a slot."""
    backlog_ms: float
    """Time until the prefills before the call's own are done."""
    prefill_ms: float
    adapter_ms: float

    @property
    def cost_ms(self) -> float:
        return self.prefill_ms + self.adapter_ms

    @property
    def burden_ms(self) -> float:
        return BURDEN * self.prefill_ms


class CostModel:
    """Computes the costs of one call at the workers of one pool."""

    def __init__(
        self, request: PlacementRequest, pool: Pool, recent: RecentPlacements, now: float, queued: int
    ) -> None:
        typical = pool.typical
        self._adapters = request.adapters
        self._since = recent.since
        self._now = now
        # The calls ahead of this one in the queue take slots as they come free, at any worker.
        self.queue_ms = queued * typical.hold_ms / pool.slots if pool.slots else 0.0
        self._num_bytes = request.prefix.num_bytes
        self._tokens_per_byte = 1 / typical.bytes_per_token
        self.answer_tokens = typical.answer_tokens
        """Predicted tokens of the answer; never more than the call's `max_tokens`."""
        if request.max_tokens is not None:
            self.answer_tokens = min(self.answer_tokens, max(0, request.max_tokens))
        self._media = request.media
        self._facts = facts_of(pool)

    def uncached_tokens(self, cached_bytes: int) -> float:
        """Return the tokens that a worker computes: those of the text, and the cells of pictures and sounds."""
        tokens = (self._num_bytes - cached_bytes) * self._tokens_per_byte
        return tokens + media_cells(self._media, self._facts, cached_bytes) if self._media else tokens

    def least_wait_ms(self, state: WorkerState) -> float:
        """Return the wait as predicted from the worker's last report alone. Calls that this gateway has placed there
        since then make it longer."""
        return max(0.0, (state.ready_at - self._now) * 1000)

    def at(self, state: WorkerState, cached_bytes: int) -> Estimate:
        """Return the estimate of the call's cost at one worker. Runs dozens of times per call, so its code is written
        for speed."""
        placed, placed_ms = self._since(state.worker, state.heard_at)
        uncached = (self._num_bytes - cached_bytes) * self._tokens_per_byte
        # Number of calls that get a slot before this one does; if negative, minus the number of free slots.
        ahead = state.ahead + placed
        slot_ms = 0.0
        if ahead >= 0 or uncached + self.answer_tokens > state.kv_free:
            slot_ms = (state.slot_at - self._now) * 1000
            if slot_ms < 0:
                slot_ms = 0.0
            slot_ms += self.queue_ms
            if ahead > 0:
                slot_ms += ahead * state.slot_ms
        backlog_ms = (state.backlog_at - self._now) * 1000
        backlog_ms = backlog_ms + placed_ms if backlog_ms > 0 else placed_ms
        prefill_ms = uncached * state.prefill_ms
        if self._media:
            cells = media_cells(self._media, self._facts, cached_bytes)
            uncached += cells
            prefill_ms += cells * (state.prefill_ms + state.beat.load.encode_ms)
        adapter_ms = 0.0
        if self._adapters:
            adapter_ms = state.adapter_load_ms * len(self._adapters.difference(state.beat.adapters_resident))
        wait_ms = slot_ms if slot_ms > backlog_ms else backlog_ms
        total_ms = wait_ms + (1 + BURDEN) * prefill_ms + adapter_ms
        return Estimate(total_ms, wait_ms, state, cached_bytes, placed, slot_ms, backlog_ms, prefill_ms, adapter_ms)

    def bid(self, estimate: Estimate) -> Bid:
        # A prompt longer than the context will be refused: until then it must not reserve cells that others need.
        kv_tokens = self.uncached_tokens(estimate.cached_bytes) + self.answer_tokens
        return Bid(
            worker=estimate.worker_state.worker,
            wait_ms=estimate.wait_ms,
            cost_ms=estimate.cost_ms,
            kv_tokens=min(estimate.worker_state.beat.n_ctx, round(kv_tokens)),
            cached_tokens=round(estimate.cached_bytes * self._tokens_per_byte),
            burden_ms=estimate.burden_ms,
        )


NO_FACTS = ModelFacts(n_ctx_train=0, n_params=0, size=0, n_vocab=0)


def facts_of(pool: Pool) -> ModelFacts:
    """Return the facts of the model that all workers of a pool have."""
    return next((state.beat.facts for state in pool.states.values()), NO_FACTS)


def media_cells(media: Iterable[PlacedMedium], facts: ModelFacts, cached_bytes: int) -> int:
    """Return about how many cells the pictures and sounds take that a worker with so many bytes cached computes.

    The bytes that stand for a medium in prefixes count as text besides, some 250 tokens: too little to matter."""
    return sum([cells_of(one.kind, facts) for one in media if one.end > cached_bytes])


CONTEXT_MARGIN = 0.75
"""Share of a prompt's estimated tokens for which a worker's context (n_ctx) must have room. It is below 1 as the
estimate may be too high: the worker counts exactly, and refuses prompts that are too long."""


@dataclass(frozen=True, slots=True)
class Requirements:
    """The properties that a worker must have to serve a call."""

    n_ctx: float = 0.0
    """Minimum context size, in tokens."""
    adapters: frozenset[str] = frozenset()
    worker: str = ""
    """The only worker allowed, because it has the slot that the call asks for; empty: every worker is allowed."""
    avoid: frozenset[str] = frozenset()
    room: bool = False
    """Whether the worker must have memory for the call's adapters right now."""
    inputs: frozenset[Modality] = frozenset()
    """Kinds of input that the worker must take beside text: while a fleet is changed, not all of a model's may."""

    def unmet_by(self, state: WorkerState) -> str:
        """Return a sentence about the first requirement that a worker does not meet; "" if it meets them all."""
        beat = state.beat
        if beat.draining or beat.slots <= 0:
            return "it is reserved for another worker" if beat.reserved else "it is draining"
        if beat.protocol != PROTOCOL_VERSION:
            return f"it speaks protocol {beat.protocol}, this gateway {PROTOCOL_VERSION}"
        if state.worker in self.avoid:
            return "this call has failed there"
        if self.worker and state.worker != self.worker:
            return f"the call asked for a slot of {self.worker}"
        if self.n_ctx > beat.n_ctx:
            return f"the call needs at least {self.n_ctx:.0f} tokens of context, it has {beat.n_ctx}"
        if self.inputs and not self.inputs.issubset(beat.facts.inputs):
            return f"it takes no input of the kind {', '.join(sorted(self.inputs.difference(beat.facts.inputs)))}"
        if self.adapters and not self.adapters.issubset(beat.adapters):
            return f"it has no adapter {', '.join(sorted(self.adapters.difference(beat.adapters)))}"
        if self.room and len(self.adapters.difference(beat.adapters_resident)) > beat.adapter_room:
            return "running calls and pinned ones take all its places for adapters"
        return ""

    def met_by_all(self, pool: Pool) -> bool:
        """Return True only if surely every serving worker meets the requirements; False means that some may not."""
        if self.avoid or self.worker or self.room or self.inputs:
            return False
        return self.n_ctx <= pool.n_ctx and self.adapters.issubset(pool.adapters)

    def unsuitable(self, pool: Pool, most: int) -> frozenset[str] | None:
        """Return the workers that serve but do not meet the requirements; None if there are more than `most` such
        workers."""
        if self.met_by_all(pool):
            return frozenset()
        unsuitable: list[str] = []
        for state in pool.numbered:
            if state is not None and self.unmet_by(state):
                unsuitable.append(state.worker)
                if len(unsuitable) > most:
                    return None
        return frozenset(unsuitable)


def requirements_of(request: PlacementRequest, pool: Pool, avoid: frozenset[str]) -> Iterator[Requirements]:
    """Yield sets of requirements for the call's worker, the strictest set first. Try a set only if no worker meets the
    sets before it. Later sets allow workers that have failed the call. The last set allows any worker, since that
    worker's refusal tells the caller what is wrong."""
    tokens = request.prefix.num_bytes / pool.typical.bytes_per_token
    if request.media:
        tokens += media_cells(request.media, facts_of(pool), 0)
    tokens *= CONTEXT_MARGIN
    inputs = frozenset(MODALITY_OF[one.kind] for one in request.media)
    place = find_slot(request.slot, pool.by_id()) if request.slot != ANY else None
    if place is not None:
        yield Requirements(tokens, request.adapters, place[0].worker, avoid, inputs=inputs)
    if request.adapters:
        yield Requirements(tokens, request.adapters, "", avoid, room=True, inputs=inputs)
    yield Requirements(tokens, request.adapters, "", avoid, inputs=inputs)
    if avoid:
        yield Requirements(tokens, request.adapters, inputs=inputs)
    if tokens or request.adapters:
        if avoid:
            yield Requirements(avoid=avoid, inputs=inputs)
        yield Requirements(inputs=inputs)
    if inputs:
        yield Requirements()
