"""Makes the errors of calls that limits or budgets refuse: they name the subject, the limit, what is used of it, and
when there is room again.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from decimal import Decimal
from time import time
from zoneinfo import ZoneInfo

from accounts.protocol.periods import UTC as UTC_NAME
from accounts.protocol.periods import is_known
from accounts.protocol.usage import NANO
from gateway import back_pressure
from gateway.call import Subject
from gateway.errors import ContextOverflow, RateLimited
from gateway.limits.plan import Plan, SubjectPlan

REQUESTS, TOKENS, TOKENS_OF_DAY, TOKENS_OF_MONTH, CALLS, FIRST_BUDGET = range(1, 7)
"""Numbers of limits in `lua/reserve.lua`; further budgets follow the first."""
NAMES = {
    REQUESTS: "requests_per_minute",
    TOKENS: "tokens_per_minute",
    TOKENS_OF_DAY: "tokens_per_day",
    TOKENS_OF_MONTH: "tokens_per_month",
    CALLS: "max_parallel",
}
BUDGET, PROMPT = "budget", "max_prompt_tokens"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The limit that refuses a call."""

    place: int
    """Number of the subject in the call's plan, from 0."""
    limit: int
    used: int
    wait_ms: int = 0
    """Milliseconds until there is room; 0: until a period or a call ends."""

    @property
    def name(self) -> str:
        return NAMES.get(self.limit, BUDGET)

    def error(self, plan: Plan, tokens: int, currency: str) -> RateLimited:
        """Return the error. `tokens`: the call's estimate."""
        subject = plan.subjects[self.place]
        whose, limits, name = whose_limit(subject.subject), subject.subject.limits, self.name
        wait_s = self.wait_ms / 1000
        match self.limit:
            case 1:
                most = limits.requests_per_minute or 0
                return back_pressure.limit_reached(whose, name, self.used, most, "requests per minute", wait_s)
            case 2:
                most = limits.tokens_per_minute or 0
                return back_pressure.tokens_reached(whose, name, self.used, most, tokens, "tokens per minute", wait_s)
            case 3:
                return self._period_error(
                    subject, limits.tokens_per_day or 0, tokens, "tokens per day", subject.day.ends_at
                )
            case 4:
                most, end = limits.tokens_per_month or 0, subject.month.ends_at
                return self._period_error(subject, most, tokens, "tokens per month", end)
            case 5:
                most = limits.max_parallel or 0
                return back_pressure.limit_reached(whose, name, self.used, most, "calls under way", 0)
        return self._budget_error(subject, currency)

    def _period_error(self, subject: SubjectPlan, most: int, tokens: int, unit: str, end: int) -> RateLimited:
        whose, renews = whose_limit(subject.subject), shown(end, UTC_NAME)
        return back_pressure.period_spent(
            whose, self.name, self.used, most, tokens, unit, renews, max(1.0, end - time())
        )

    def _budget_error(self, subject: SubjectPlan, currency: str) -> RateLimited:
        plan = subject.budgets[self.limit - FIRST_BUDGET]
        budget = plan.budget
        spent, amount = money(self.used, currency), money(round(budget.amount * NANO), currency)
        renews = shown(plan.span.ends_at, budget.time_zone)
        whose, wait_s = whose_limit(subject.subject), max(1.0, plan.span.ends_at - time())
        return back_pressure.budget_spent(whose, spent, amount, budget.period, renews, wait_s)


def whose_limit(subject: Subject) -> str:
    """Return a subject as messages name it."""
    kind = "model" if subject.kind == "alias" else subject.kind
    return f"{kind} {subject.name!r}"


def shown(at: int, time_zone: str) -> str:
    """Return a time for people, such as `2026-02-01 00:00 (Europe/Berlin)`."""
    zone: tzinfo = ZoneInfo(time_zone) if time_zone != UTC_NAME and is_known(time_zone) else UTC
    return f"{datetime.fromtimestamp(at, zone):%Y-%m-%d %H:%M} ({time_zone})"


def money(nano: int, currency: str) -> str:
    """Return an amount for people: two decimals, or more where these would show nothing."""
    amount = Decimal(nano) / NANO
    rounded = round(amount, 2)
    return f"{rounded if rounded == amount or nano >= NANO else amount.normalize():f} {currency}"


def prompt_too_long(subject: Subject, num_tokens: int) -> ContextOverflow:
    """Return the error for a prompt that is longer than a subject's `max_prompt_tokens`."""
    most = subject.limits.max_prompt_tokens or 0
    remedy = f"that is the limit of {whose_limit(subject)} ({PROMPT}); shorten the prompt or ask an admin to raise it"
    return ContextOverflow(remedy, num_prompt_tokens=num_tokens, n_ctx=most)
