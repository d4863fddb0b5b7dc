"""Messages of refusals."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from accounts.protocol.records import Budget, Limits
from accounts.protocol.usage import NANO
from gateway.call import Principal, Subject
from gateway.limits.plan import plan_of
from gateway.limits.refusals import CALLS, FIRST_BUDGET, REQUESTS, TOKENS, TOKENS_OF_DAY, Refusal, money

TEAM = Subject(
    "team",
    "red",
    Limits(
        requests_per_minute=600,
        tokens_per_minute=1000,
        tokens_per_day=50_000,
        max_parallel=4,
        budgets=(Budget(amount=100, period="week", time_zone="Europe/Berlin"),),
    ),
)
PLAN = plan_of(
    Principal("k", "red", None, admin=False, subjects=(TEAM,)), None, datetime(2026, 3, 18, 12, tzinfo=UTC).timestamp()
)


@pytest.mark.parametrize(
    ("refusal", "tokens", "message", "final"),
    [
        (
            Refusal(0, REQUESTS, 600, 12_300),
            10,
            "Rate limit reached: team 'red' has used 600 of 600 requests per minute (requests_per_minute). There is "
            "room again in 13 s.",
            False,
        ),
        (
            Refusal(0, TOKENS, 950, 2_000),
            100,
            "Rate limit reached: team 'red' has used 950 of 1000 tokens per minute (tokens_per_minute), and this "
            "request is estimated to take 100 with its answer. There is room again in 2 s.",
            False,
        ),
        (
            Refusal(0, TOKENS, 0, 2_000),
            1001,
            "Request too large: it is estimated to take 1001 tokens with its answer, and team 'red' may use 1000 "
            "tokens per minute (tokens_per_minute). Send less or lower `max_tokens`.",
            True,
        ),
        (
            Refusal(0, TOKENS_OF_DAY, 49_990),
            100,
            "Limit reached: team 'red' has used 49990 of 50000 tokens per day (tokens_per_day), and this request is "
            "estimated to take 100. The limit is renewed on 2026-03-19 00:00 (UTC).",
            True,
        ),
        (
            Refusal(0, CALLS, 4),
            10,
            "Rate limit reached: team 'red' has used 4 of 4 calls under way (max_parallel). Wait for some to end.",
            False,
        ),
        (
            Refusal(0, FIRST_BUDGET, 99_950 * NANO // 1000),
            10,
            "Budget reached: team 'red' has spent 99.95 EUR of its 100.00 EUR of this week, and this request is "
            "estimated to cost more than is left. The budget is renewed on 2026-03-23 00:00 (Europe/Berlin); an admin "
            "may raise it.",
            True,
        ),
    ],
)
def test_refusals_name_subject_limit_use_and_renewal(refusal: Refusal, tokens: int, message: str, final: bool) -> None:
    assert PLAN is not None
    error = refusal.error(PLAN, tokens, "EUR")
    assert (error.message, error.is_final, error.status) == (message, final, 429)
    assert error.retry_after_s is not None
    assert error.retry_after_s >= 1


def test_money_is_shown_as_people_write_it() -> None:
    shown = [money(nano, "EUR") for nano in (12 * NANO, NANO // 100, 1_234_567, 30_000, 0)]
    assert shown == ["12.00 EUR", "0.01 EUR", "0.001234567 EUR", "0.00003 EUR", "0.00 EUR"]
