"""Why each worker of a pool stands where it does for one call: the ranking's own sums, for all workers. Pure.

Slower than `rank`, which looks at few of them; for people.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gateway.routing.ask import Ask
from gateway.routing.cost import Estimate, Price, Recent
from gateway.routing.needs import Needs, needs_of
from gateway.routing.pool import Pool


@dataclass(frozen=True, slots=True)
class Placed:
    """A worker that would do. Times are milliseconds, and add up as `gateway.routing.cost` says."""

    worker: str
    total_ms: float
    wait_ms: float
    slot_ms: float
    """Until it has a slot."""
    backlog_ms: float
    """Until the prompts before this one are computed."""
    prefill_ms: float
    """Of what is not cached there."""
    adapter_ms: float
    burden_ms: float
    """What its prefill costs others."""
    cached_tokens: int
    uncached_tokens: int
    free_slots: int
    """By its news; below 0: so many calls wait there."""
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
    """Best first; where two are equal, calls take turns."""
    left_out: tuple[LeftOut, ...] = ()
    """By worker."""
    waived: tuple[str, ...] = ()
    """What the call would like and no worker has: `slot`, `context`, `adapters`, `avoided` (all have failed it)."""


def explain(
    ask: Ask, pool: Pool, recent: Recent, *, now: float, queued: int = 0, avoid: frozenset[str] = frozenset()
) -> Explanation:
    """As `gateway.routing.rank.rank`."""
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
    """By worker's number: where the deepest head ends that it has."""
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
