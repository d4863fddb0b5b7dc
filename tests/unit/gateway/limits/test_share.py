"""Shares of gateways while Redis is away."""

from __future__ import annotations

from datetime import UTC, datetime
from time import monotonic
from typing import Any

import pytest

from accounts.protocol.records import Budget, Limits
from accounts.protocol.usage import NANO
from gateway.call import Principal, Subject
from gateway.limits.counts import SubjectCounts
from gateway.limits.plan import Plan, plan_of
from gateway.limits.refusals import Refusal
from gateway.limits.share import Away, GatewayShare, decide
from gateway.store.limits import WINDOW_S

TICK = 1_000_000
NOW = datetime(2026, 3, 18, 12, tzinfo=UTC).timestamp()


def plan(**limits: Any) -> Plan:
    made = plan_of(Principal("k", "t", None, admin=False, subjects=(Subject("key", "k", Limits(**limits)),)), None, NOW)
    assert made is not None
    return made


def away(number: int = 0, gateways: int = 4, *, for_s: float = 1.0, blind_s: float = 0.0) -> Away:
    now = monotonic()
    return Away(GatewayShare(number, gateways), TICK, now, now - for_s, now - for_s - blind_s)


def admitted(counts: SubjectCounts, made: Plan, out: Away, tokens: int = 0, most: int = 10_000) -> int:
    """How many calls are admitted one after the other."""
    for number in range(most):
        if decide(made, (counts,), tokens, 0, out) is not None:
            return number
        counts.count_untold(TICK, 1, tokens)
        counts.calls += made.subjects[0].has_calls
    return most


def heard(requests: int, *, own: int = 0, tokens: int = 0, calls: int = 0, ago_s: float = 1.0) -> SubjectCounts:
    counts = SubjectCounts("key:k")
    counts.count_told(TICK - 10, own, 0)
    counts.hear(TICK - 4, monotonic() - ago_s, requests, tokens, calls)
    return counts


@pytest.mark.parametrize("limit", [600, 599, 3, 1])
def test_the_shares_of_all_gateways_add_up_to_the_limit(limit: int) -> None:
    made = plan(requests_per_minute=limit)
    assert sum(admitted(SubjectCounts("key:k"), made, away(number)) for number in range(4)) == limit


def test_what_was_used_before_is_not_shared_again() -> None:
    made = plan(requests_per_minute=600)
    for number in range(4):
        assert admitted(heard(560, own=140), made, away(number)) == 10
    assert admitted(heard(600, own=150), made, away()) == 0


def test_what_a_gateway_itself_had_admitted_is_free_again_a_minute_later() -> None:
    made, counts = plan(requests_per_minute=600), heard(600, own=150)
    assert admitted(counts, made, away()) == 0
    counts.told = {TICK - 1000: [150, 0]}
    assert admitted(counts, made, away()) == 0, "it no longer knows what was its own"
    later = away(for_s=WINDOW_S + 1)
    counts.heard_at = monotonic() - WINDOW_S - 2
    assert admitted(counts, made, later) == 150


def test_a_window_that_was_growing_is_taken_to_have_grown_on() -> None:
    made, counts = plan(requests_per_minute=600), heard(200)
    counts.growth = (100.0, 0.0)
    assert admitted(counts, made, away(for_s=1.0)) <= (600 - 200 - 50) // 4 + 1


def test_tokens_are_shared_as_requests_are() -> None:
    made = plan(tokens_per_minute=1000)
    assert sum(admitted(SubjectCounts("key:k"), made, away(number), tokens=50) for number in range(4)) == 20


def test_calls_under_way_are_shared() -> None:
    made = plan(max_parallel=8)
    assert sum(admitted(SubjectCounts("key:k"), made, away(number)) for number in range(4)) == 8
    assert admitted(heard(0, calls=8), made, away()) == 0


def test_of_a_period_only_the_rest_that_is_known_is_shared() -> None:
    made = plan(tokens_per_day=1000)
    field, begin = made.subjects[0].token_periods()[0]
    counts = SubjectCounts("key:k", periods={field: (begin, 800)})
    assert decide(made, (counts,), 50, 0, away()) is None
    assert isinstance(decide(made, (counts,), 51, 0, away()), Refusal)
    counts.count_period(field, begin, 50)
    assert isinstance(decide(made, (counts,), 1, 0, away()), Refusal)


def test_a_period_that_is_not_known_admits_nothing() -> None:
    found = decide(plan(budgets=(Budget(amount=10),)), (SubjectCounts("key:k"),), 0, 5, away())
    assert isinstance(found, str)


def test_a_period_that_began_since_is_empty() -> None:
    made = plan(budgets=(Budget(amount=10),))
    field, begin = made.subjects[0].budgets[0].field, made.subjects[0].budgets[0].span.begins_at
    counts = SubjectCounts("key:k", periods={field: (begin - 86_400 * 30, 10 * NANO)})
    assert decide(made, (counts,), 0, 2 * NANO, away()) is None


def test_a_gateway_that_stood_still_admits_nothing_for_a_minute() -> None:
    made = plan(requests_per_minute=600)
    assert isinstance(decide(made, (SubjectCounts("key:k"),), 0, 0, away(blind_s=5.0)), str)
    assert decide(made, (SubjectCounts("key:k"),), 0, 0, away(for_s=WINDOW_S, blind_s=5.0)) is None
