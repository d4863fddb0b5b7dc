"""Decides about calls while Redis is away: each gateway may admit its share of what was left of a limit when Redis was
last heard of. Pure.

    may have counted = what it had counted then + (limit - what all had counted then) / number of gateways

After a window's length without Redis nothing of before counts any more, and the share is limit / number of gateways.
What others may have counted since Redis was last heard of is added by the rate at which the window grew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from accounts.protocol.limit_counters import DAY_TOKENS, MONTH_TOKENS
from gateway.limits.counts import NONE, SubjectCounts
from gateway.limits.plan import Plan, SubjectPlan
from gateway.limits.refusals import (
    CALLS,
    FIRST_BUDGET,
    REQUESTS,
    TOKENS,
    TOKENS_OF_DAY,
    TOKENS_OF_MONTH,
    Refusal,
)
from gateway.store.limits import TICK_MS, WINDOW_S

FRESH_S = 2.0
"""Seconds for which what was last heard of Redis may be used. A process that stood still has heard of nothing since."""
LATE_S = 2 * TICK_MS / 1000
"""Seconds within which others may have counted more without this process having heard of it."""
RETRY_MS = 5000


@dataclass(frozen=True, slots=True)
class GatewayShare:
    """This process's place in the sorted list of gateway processes."""

    index: int = 0
    num_gateways: int = 1

    def of(self, rest: float, name: str) -> int:
        """Return this process's share of what is left of a limit of the subject `name`. All shares add up to it."""
        left = max(0, int(rest))
        first = (self.index - crc32(name.encode())) % self.num_gateways
        return left // self.num_gateways + (first < left % self.num_gateways)


@dataclass(frozen=True, slots=True)
class Away:
    """A time during which Redis is away."""

    share: GatewayShare
    tick: int
    now: float
    since: float
    """time.monotonic() since when Redis is away."""
    heard_at: float
    """time.monotonic() when Redis last told what others use."""

    @property
    def is_blind(self) -> bool:
        """Whether this process can't know what others have counted: it stood still before Redis went away."""
        return self.since - self.heard_at > FRESH_S and self.now - self.heard_at < WINDOW_S


def decide(plan: Plan, counts: Sequence[SubjectCounts], tokens: int, cost: int, away: Away) -> Refusal | str | None:
    """Return the limit that refuses a call, or why it can't be decided; None: the call is admitted."""
    if away.is_blind:
        return "this gateway stood still, and does not know what others have admitted"
    for place, (subject, known) in enumerate(zip(plan.subjects, counts, strict=True)):
        found = _of_windows(place, subject, known, tokens, away) or _of_periods(place, subject, known, tokens, away)
        found = found or _of_budgets(place, subject, known, cost, away)
        if found is not None:
            return found
    return None


def _of_windows(
    place: int, subject: SubjectPlan, known: SubjectCounts, tokens: int, away: Away
) -> Refusal | str | None:
    limits, name, share = subject.subject.limits, subject.name, away.share
    heard, own_then = NONE, NONE
    late_s = max(0.0, away.since - known.heard_at) + LATE_S
    if known.heard_at and away.now - known.heard_at < WINDOW_S:
        heard, own_then = known.heard, known.own_when_heard()
    else:
        late_s = 0.0
    own = known.own(away.tick)
    requests, more = limits.requests_per_minute, known.growth
    if requests is not None:
        most = own_then.requests + share.of(requests - heard.requests - more[0] * late_s, name)
        if own.requests + 1 > most:
            return Refusal(place, REQUESTS, max(heard.requests, own.requests), RETRY_MS)
    if limits.tokens_per_minute is not None:
        most = own_then.tokens + share.of(limits.tokens_per_minute - heard.tokens - more[1] * late_s, name)
        if own.tokens + tokens > most or own.tokens >= most:
            return Refusal(place, TOKENS, max(heard.tokens, own.tokens), RETRY_MS)
    if limits.max_parallel is not None:
        most = known.heard_own_calls + share.of(limits.max_parallel - known.heard_calls, name)
        if known.calls + 1 > most:
            return Refusal(place, CALLS, max(known.heard_calls, known.calls))
    return None


def _of_periods(
    place: int, subject: SubjectPlan, known: SubjectCounts, tokens: int, away: Away
) -> Refusal | str | None:
    limits = subject.subject.limits
    for limit, field, begin, most in (
        (TOKENS_OF_DAY, DAY_TOKENS, subject.day.begins_at, limits.tokens_per_day),
        (TOKENS_OF_MONTH, MONTH_TOKENS, subject.month.begins_at, limits.tokens_per_month),
    ):
        what = (subject.name, field, begin)
        if most is not None and (found := _of_period(place, limit, what, known, most, tokens, away)):
            return found
    return None


def _of_budgets(place: int, subject: SubjectPlan, known: SubjectCounts, cost: int, away: Away) -> Refusal | str | None:
    for number, budget in enumerate(subject.budgets):
        what = (subject.name, budget.field, budget.span.begins_at)
        most, limit = budget.most_nano, FIRST_BUDGET + number
        if most and (found := _of_period(place, limit, what, known, most, cost, away)):
            return found
    return None


def _of_period(
    place: int,
    limit: int,
    what: tuple[str, str, int],
    known: SubjectCounts,
    most: int,
    wanted: int,
    away: Away,
) -> Refusal | str | None:
    """Decide by one counter of a period. `what`: the subject's name, the field, when the period begins."""
    name, field, begin = what
    told = known.periods.get(field)
    if told is None:
        return f"this gateway does not know how much {name} has used in this period"
    value = told[1] if told[0] == begin else 0
    own_begin, own = known.untold_periods.get(field, (begin, 0))
    own = max(0, own) if own_begin == begin else 0
    allowed = away.share.of(most - value, name)
    return Refusal(place, limit, value + own) if own + wanted > allowed or own >= allowed else None
