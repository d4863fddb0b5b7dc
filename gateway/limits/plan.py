"""Makes the `Plan` of a call: the counters of its subjects. A plan holds until one of its periods ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from accounts.protocol.limit_counters import DAY_TOKENS, MONTH_TOKENS, budget_field, subject_name
from accounts.protocol.periods import UTC, Span, span_at
from accounts.protocol.records import Budget, Period
from accounts.protocol.usage import NANO
from gateway.call import Principal, Subject

Argument = str | int

QUARTER_S = 900


def period_at(period: Period, time_zone: str, at: float) -> Span:
    """Return the period around the unix time `at`, as `span_at` does."""
    return _period_of(period, time_zone, int(at // QUARTER_S))


@lru_cache(maxsize=1024)
def _period_of(period: Period, time_zone: str, quarter: int) -> Span:
    """Return the period around a quarter of an hour, numbered since 1970: in every time zone, days begin at one."""
    return span_at(period, time_zone, quarter * QUARTER_S)


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """A budget, and the counter of its present period."""

    budget: Budget
    span: Span

    @property
    def field(self) -> str:
        """The name of the counter."""
        return budget_field(self.budget)

    @property
    def most_nano(self) -> int:
        """The amount at which calls are refused, in nano units; 0: they never are."""
        return max(1, round(self.budget.amount * NANO)) if self.budget.refuses else 0


@dataclass(frozen=True, slots=True)
class SubjectPlan:
    """One subject that a call counts for, with its counters."""

    subject: Subject
    name: str
    """The subject's name in Redis."""
    budgets: tuple[BudgetPlan, ...]
    day: Span
    month: Span

    @property
    def has_window(self) -> bool:
        limits = self.subject.limits
        return limits.requests_per_minute is not None or limits.tokens_per_minute is not None

    @property
    def has_calls(self) -> bool:
        return self.subject.limits.max_parallel is not None

    @property
    def budget_fields(self) -> tuple[str, ...]:
        return tuple(budget.field for budget in self.budgets)

    def token_periods(self) -> list[tuple[str, int]]:
        """Return the counters of tokens that it has: field, and when the period begins."""
        limits = self.subject.limits
        found = [(DAY_TOKENS, self.day.begins_at)] if limits.tokens_per_day is not None else []
        if limits.tokens_per_month is not None:
            found.append((MONTH_TOKENS, self.month.begins_at))
        return found

    def reserve_arguments(self) -> tuple[Argument, ...]:
        """Return the arguments of `lua/reserve.lua`."""
        limits = self.subject.limits
        most = (
            limits.requests_per_minute,
            limits.tokens_per_minute,
            limits.tokens_per_day,
            limits.tokens_per_month,
            limits.max_parallel,
        )
        budgets = [(budget.field, budget.span.begins_at, budget.most_nano) for budget in self.budgets]
        return (self.name, *(each or 0 for each in most), len(budgets), *(each for row in budgets for each in row))

    def settle_arguments(self, number: int) -> tuple[Argument, ...]:
        """Return the arguments of `lua/settle.lua`. `number`: that of the window's tick in which the call was
        admitted; 0: not known."""
        limits = self.subject.limits
        has = (limits.tokens_per_day is not None, limits.tokens_per_month is not None, self.has_calls)
        budgets = [each for budget in self.budgets for each in (budget.field, budget.span.begins_at)]
        window = number if self.has_window else ""
        return (self.name, window, *map(int, has), len(self.budgets), *budgets)


@dataclass(frozen=True, slots=True)
class Plan:
    """The subjects that a call counts for, and its bounds."""

    principal: Principal
    alias: Subject | None
    subjects: tuple[SubjectPlan, ...]
    """The subjects with anything that is counted in Redis."""
    valid_until: float
    """Unix time at which the first of the counted periods ends."""
    arguments: tuple[Argument, ...]
    """The arguments of `lua/reserve.lua` behind the estimates."""
    max_tokens: int | None
    """Maximum tokens of an answer, by the alias; None: it has no such limit. Those of the key are in its bounds."""
    prompt_subject: Subject | None
    """The subject with the least `max_prompt_tokens`; None: there is none."""


def plan_of(principal: Principal, alias: Subject | None, at: float) -> Plan | None:
    """Return what a call counts for at the unix time `at`; None: it has no limits."""
    subjects = principal.subjects if alias is None else (*principal.subjects, alias)
    if not subjects:
        return None
    day, month = period_at("day", UTC, at), period_at("month", UTC, at)
    counted = tuple(_subject_plan(each, day, month, at) for each in subjects if _is_counted(each))
    arguments: list[Argument] = [day.begins_at, month.begins_at]
    for one in counted:
        arguments += one.reserve_arguments()
    prompts = [each for each in subjects if each.limits.max_prompt_tokens is not None]
    return Plan(
        principal,
        alias,
        counted,
        float(min(_ends(counted, day))),
        tuple(arguments),
        None if alias is None else alias.limits.max_tokens,
        min(prompts, key=lambda each: each.limits.max_prompt_tokens or 0, default=None),
    )


def _is_counted(subject: Subject) -> bool:
    limits = subject.limits
    numbers = (
        limits.requests_per_minute,
        limits.tokens_per_minute,
        limits.tokens_per_day,
        limits.tokens_per_month,
        limits.max_parallel,
    )
    return bool(limits.budgets) or any(number is not None for number in numbers)


def _subject_plan(subject: Subject, day: Span, month: Span, at: float) -> SubjectPlan:
    budgets = dict[str, BudgetPlan]()
    for budget in subject.limits.budgets:
        plan = BudgetPlan(budget, period_at(budget.period, budget.time_zone, at))
        kept = budgets.get(plan.field)
        if kept is None or 0 < plan.most_nano < (kept.most_nano or plan.most_nano + 1):
            budgets[plan.field] = plan  # of several with the same periods, the least refuses
    return SubjectPlan(subject, subject_name(subject.kind, subject.name), tuple(budgets.values()), day, month)


def _ends(subjects: Sequence[SubjectPlan], day: Span) -> Iterable[int]:
    yield day.ends_at
    for one in subjects:
        yield from (budget.span.ends_at for budget in one.budgets)
