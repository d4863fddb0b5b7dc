"""Explains the ranking of one call: the same sums as the ranking's, for all workers of a pool. Pure.

It is for people, and slower than `rank`, which looks at few workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gateway.routing.cost import Estimate, Needs, Price, Recent, needs_of
from gateway.routing.placement import Ask
from gateway.routing.pool import Pool


@dataclass(frozen=True, slots=True)
class Placed:
    """A worker that would do. Times are milliseconds, and add up as `gateway.routing.cost` says."""

    worker: str
    total_ms: float
    wait_ms: float
    slot_ms: float
    """Time until it has a slot."""
    backlog_ms: float
    """Time until the prefills before this one are done."""
    prefill_ms: float
    """Time to prefill the uncached part of the prompt."""
    adapter_ms: float
    burden_ms: float
    """Cost of its prefill for other calls."""
    cached_tokens: int
    uncached_tokens: int
    free_slots: int
    """Free slots by its news; below 0: minus the number of calls that wait there."""
    placed: int
    """Calls that this gateway has sent there since its news, less those that have ended."""
    heard_s_ago: float

    @property
    def cost_ms(self) -> float:
        return self.prefill_ms + self.adapter_ms


@dataclass(frozen=True, slots=True)
class LeftOut:
    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    ranked: tuple[Placed, ...] = ()
    """Workers that would do, best first; where two are equal, calls take turns."""
    left_out: tuple[LeftOut, ...] = ()
    """Workers that would not do, sorted by name."""
    waived: tuple[str, ...] = ()
    """Wishes of the call that no worker meets: `slot`, `context`, `adapters`, `avoided` (all have failed it)."""


def explain(
    ask: Ask, pool: Pool, recent: Recent, *, now: float, queued: int = 0, avoid: frozenset[str] = frozenset()
) -> Explanation:
    """Return the ranking of all workers and the reasons. The parameters are those of `gateway.routing.rank.rank`."""
    price = Price(ask, pool, recent, now, queued)
    wishes = list(needs_of(ask, pool, avoid))
    for needs in wishes:
        reasons = {name: needs.lacking(there) for name, there in sorted(pool.standings.items())}
        fit = [pool.standings[name] for name, reason in reasons.items() if not reason]
        if not fit:
            continue
        cached = _cached_bytes(ask, pool)
        estimates = sorted((price.at(there, cached.get(there.number, 0)) for there in fit), key=_total_ms)
        left_out = tuple(LeftOut(name, reason) for name, reason in reasons.items() if reason)
        return Explanation(tuple(_placed(one, price, now) for one in estimates), left_out, _waived(wishes[0], needs))
    nobody = (LeftOut(name, wishes[-1].lacking(there)) for name, there in sorted(pool.standings.items()))
    return Explanation(left_out=tuple(nobody))


def _total_ms(estimate: Estimate) -> float:
    return estimate.total_ms


def _placed(estimate: Estimate, price: Price, now: float) -> Placed:
    there = estimate.standing
    bid = price.bid(estimate)
    return Placed(
        worker=there.worker,
        total_ms=estimate.total_ms,
        wait_ms=estimate.wait_ms,
        slot_ms=estimate.slot_ms,
        backlog_ms=estimate.backlog_ms,
        prefill_ms=estimate.prefill_ms,
        adapter_ms=estimate.adapter_ms,
        burden_ms=estimate.burden_ms,
        cached_tokens=bid.cached_tokens,
        uncached_tokens=round(price.uncached_tokens(estimate.cached_bytes)),
        free_slots=-there.ahead,
        placed=estimate.placed,
        heard_s_ago=max(0.0, now - there.heard_at),
    )


def _cached_bytes(ask: Ask, pool: Pool) -> dict[int, int]:
    """Return worker number -> bytes of the longest prefix whose hash it has."""
    ends: dict[int, int] = {}
    for place, holders in pool.heads.levels(ask.prefix.digests):
        for number in (holders,) if isinstance(holders, int) else holders:
            ends.setdefault(number, ask.prefix.ends[place])
    return ends


def _waived(wished: Needs, met: Needs) -> tuple[str, ...]:
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
