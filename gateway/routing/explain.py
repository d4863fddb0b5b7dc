"""Explains the ranking of one call to people: computes the same costs as `rank`, but for all workers of a pool. Pure.

It is slower than `rank`, which looks at few workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gateway.routing.cost import CostModel, Estimate, RecentPlacements, Requirements, requirements_of
from gateway.routing.placement import PlacementRequest
from gateway.routing.pool import Pool


@dataclass(frozen=True, slots=True)
class RankedWorker:
    """A worker that meets the requirements. Times are milliseconds, and add up as `gateway.routing.cost` says."""

    worker: str
    total_ms: float
    wait_ms: float
    slot_ms: float
    """Time until the call has a slot."""
    backlog_ms: float
    """Time until the prefills before the call's own are done."""
    prefill_ms: float
    """Time to prefill the uncached part of the prompt."""
    adapter_ms: float
    burden_ms: float
    """Cost of the call's prefill to other calls."""
    cached_tokens: int
    uncached_tokens: int
    free_slots: int
    """Free slots when the worker last reported its load; if negative, minus the number of calls that wait there."""
    placed: int
    """Number of calls that this gateway has sent there since the worker last reported, minus those that have ended."""
    heard_s_ago: float

    @property
    def cost_ms(self) -> float:
        return self.prefill_ms + self.adapter_ms


@dataclass(frozen=True, slots=True)
class ExcludedWorker:
    """A worker that does not meet the requirements, and the reason."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The ranking of all workers of a model for one call."""

    ranked: tuple[RankedWorker, ...] = ()
    """Workers that meet the requirements, best first. Calls take turns among workers of equal cost."""
    left_out: tuple[ExcludedWorker, ...] = ()
    """All other workers, sorted by name."""
    waived: tuple[str, ...] = ()
    """Requirements dropped because no worker meets them all: `slot`, `context`, `adapters`, `avoided` (workers that
    have failed the call may be used again)."""


def explain(
    request: PlacementRequest,
    pool: Pool,
    recent: RecentPlacements,
    *,
    now: float,
    queued: int = 0,
    avoid: frozenset[str] = frozenset(),
) -> Explanation:
    """Return the ranking of all workers, with reasons. The parameters are those of `gateway.routing.rank.rank`."""
    costs = CostModel(request, pool, recent, now, queued)
    steps = list(requirements_of(request, pool, avoid))
    for requirements in steps:
        reasons = {name: requirements.unmet_by(state) for name, state in sorted(pool.states.items())}
        fit = [pool.states[name] for name, reason in reasons.items() if not reason]
        if not fit:
            continue
        cached = _cached_bytes(request, pool)
        estimates = sorted((costs.at(state, cached.get(state.number, 0)) for state in fit), key=_total_ms)
        left_out = tuple(ExcludedWorker(name, reason) for name, reason in reasons.items() if reason)
        return Explanation(
            tuple(_ranked_worker(one, costs, now) for one in estimates),
            left_out,
            _waived(steps[0], requirements),
        )
    nobody = (ExcludedWorker(name, steps[-1].unmet_by(state)) for name, state in sorted(pool.states.items()))
    return Explanation(left_out=tuple(nobody))


def _total_ms(estimate: Estimate) -> float:
    return estimate.total_ms


def _ranked_worker(estimate: Estimate, costs: CostModel, now: float) -> RankedWorker:
    state = estimate.worker_state
    bid = costs.bid(estimate)
    return RankedWorker(
        worker=state.worker,
        total_ms=estimate.total_ms,
        wait_ms=estimate.wait_ms,
        slot_ms=estimate.slot_ms,
        backlog_ms=estimate.backlog_ms,
        prefill_ms=estimate.prefill_ms,
        adapter_ms=estimate.adapter_ms,
        burden_ms=estimate.burden_ms,
        cached_tokens=bid.cached_tokens,
        uncached_tokens=round(costs.uncached_tokens(estimate.cached_bytes)),
        free_slots=-state.ahead,
        placed=estimate.placed,
        heard_s_ago=max(0.0, now - state.heard_at),
    )


def _cached_bytes(request: PlacementRequest, pool: Pool) -> dict[int, int]:
    """Return, by worker number, the length in bytes of the prompt's longest prefix that the worker has a hash of."""
    ends: dict[int, int] = {}
    for place, holders in pool.hashes.levels(request.prefix.digests):
        for number in (holders,) if isinstance(holders, int) else holders:
            ends.setdefault(number, request.prefix.ends[place])
    return ends


def _waived(wished: Requirements, met: Requirements) -> tuple[str, ...]:
    def waived() -> Iterator[str]:
        if wished.worker and not met.worker:
            yield "slot"
        if wished.n_ctx > met.n_ctx:
            yield "context"
        if wished.adapters - met.adapters:
            yield "adapters"
        if wished.avoid - met.avoid:
            yield "avoided"

    return tuple(waived())
