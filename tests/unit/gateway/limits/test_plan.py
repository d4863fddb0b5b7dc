"""Plans: the counters of a call, by the limits of its subjects."""

from __future__ import annotations

from datetime import UTC, datetime

from accounts.protocol.limit_counters import budget_field, subject_name
from accounts.protocol.records import Budget, Limits
from accounts.protocol.usage import NANO
from gateway.call import Principal, Subject
from gateway.limits.plan import plan_of

NOON = datetime(2026, 3, 18, 12, tzinfo=UTC).timestamp()
DAY = int(datetime(2026, 3, 18, tzinfo=UTC).timestamp())
MONTH = int(datetime(2026, 3, 1, tzinfo=UTC).timestamp())


def holder(*subjects: Subject) -> Principal:
    return Principal("ci", "red", None, admin=False, subjects=subjects)


def test_callers_without_limits_have_no_plan() -> None:
    assert plan_of(holder(), None, NOON) is None


def test_the_arguments_are_those_that_the_script_reads() -> None:
    team = Subject("team", "red", Limits(requests_per_minute=5, tokens_per_day=100, max_parallel=2))
    plan = plan_of(holder(team), None, NOON)
    assert plan is not None
    assert plan.arguments == (DAY, MONTH, "team:red", 5, 0, 100, 0, 2, 0)
    assert plan.subjects[0].settle_arguments(7) == ("team:red", 7, 1, 0, 1, 0)
    assert plan.valid_until == DAY + 86400


def test_budgets_have_the_period_of_their_time_zone() -> None:
    budget = Budget(amount=12.5, period="week", time_zone="Asia/Tokyo")
    plan = plan_of(holder(Subject("key", "ci", Limits(budgets=(budget,)))), None, NOON)
    assert plan is not None
    begin = int(datetime(2026, 3, 15, 15, tzinfo=UTC).timestamp())
    field, amount = budget_field(budget), round(12.5 * NANO)
    assert plan.arguments[2:] == (subject_name("key", "ci"), 0, 0, 0, 0, 0, 1, field, begin, amount)
    assert plan.subjects[0].settle_arguments(0) == ("key:ci", "", 0, 0, 0, 1, field, begin)


def test_budgets_that_only_warn_refuse_nothing_and_the_least_of_a_period_refuses() -> None:
    budgets = (Budget(amount=5, refuses=False), Budget(amount=20), Budget(amount=10))
    plan = plan_of(holder(Subject("key", "ci", Limits(budgets=budgets))), None, NOON)
    assert plan is not None
    assert [budget.most_nano for budget in plan.subjects[0].budgets] == [10 * NANO]
    only = plan_of(holder(Subject("key", "ci", Limits(budgets=budgets[:1]))), None, NOON)
    assert only is not None
    assert [budget.most_nano for budget in only.subjects[0].budgets] == [0]


def test_bounds_of_one_call_are_not_counted() -> None:
    alias = Subject("alias", "fast", Limits(max_tokens=30, max_prompt_tokens=500))
    team = Subject("team", "red", Limits(max_prompt_tokens=400, max_tokens=20))
    plan = plan_of(holder(team), alias, NOON)
    assert plan is not None
    assert (plan.subjects, plan.max_tokens, plan.prompt_subject) == ((), 30, team)


def test_names_with_signs_of_their_own_stay_one_name() -> None:
    subject = Subject("user", "a|b\nc%d", Limits(max_parallel=1))
    plan = plan_of(holder(subject), None, NOON)
    assert plan is not None
    assert plan.subjects[0].name == "user:a%7Cb%0Ac%25d"
