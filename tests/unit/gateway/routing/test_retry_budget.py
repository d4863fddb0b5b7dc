"""How many calls may be tried again."""

from __future__ import annotations

import pytest

from gateway.routing.retries import BUDGET_WINDOW_S, FLOOR, RetryBudget


def taken(budget: RetryBudget, tries: int, now: float, model: str = "m") -> int:
    return sum(budget.take(model, now) for _ in range(tries))


def test_a_quiet_model_may_try_some_again_and_no_more() -> None:
    assert taken(RetryBudget(0.2), 1000, 5.0) == FLOOR


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 1.0])
def test_a_share_of_the_calls_may(share: float) -> None:
    budget = RetryBudget(share)
    for number in range(1000):
        budget.count_call("m", number / 1000)
    assert taken(budget, 5000, 1.0) == FLOOR + share * 1000


def test_a_storm_is_bounded_however_long_it_lasts() -> None:
    """Every call fails each time: submissions stay near the calls."""
    budget = RetryBudget(0.2)
    calls = retries = 0
    for now in range(100):
        for _ in range(50):
            budget.count_call("m", now)
            calls += 1
            retries += taken(budget, 3, now)
    assert retries <= 0.2 * calls + FLOOR * (100 / BUDGET_WINDOW_S + 1)
    assert retries >= 0.19 * calls


def test_what_was_spent_comes_back() -> None:
    budget = RetryBudget(0.0)
    assert taken(budget, 100, 0.5) == FLOOR
    assert taken(budget, 100, BUDGET_WINDOW_S - 0.5) == 0
    assert taken(budget, 100, BUDGET_WINDOW_S + 0.5) == FLOOR


def test_models_do_not_pay_for_each_other() -> None:
    budget = RetryBudget(0.0)
    assert taken(budget, 100, 0.0, "a") == FLOOR
    assert taken(budget, 100, 0.0, "b") == FLOOR
