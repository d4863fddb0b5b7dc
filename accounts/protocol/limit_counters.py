"""Names the counters of days, months and budgets in Redis, which gateways count, and raises those that are too low."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from accounts.protocol.records import Budget, SubjectKind
from workers.protocol import keys

DAY_TOKENS, MONTH_TOKENS = "d", "m"
"""Fields of the tokens of a day and of a month (UTC) in the hash of a subject's counters."""
MAX_FLOORS = 200
"""Maximum counters that one command raises: Redis does nothing else meanwhile."""
_SPECIAL = str.maketrans({"%": "%25", "|": "%7C", "\n": "%0A", "\0": "%00"})
"""Characters that scripts separate names by, or end them at."""


class Floor(NamedTuple):
    """The least that a counter must have counted."""

    subject: str
    """As `subject_name` returns it."""
    field: str
    begins_at: int
    """Begin of the period, unix seconds."""
    amount: int
    """Tokens, or billionths of the currency's unit."""


def subject_name(kind: SubjectKind, name: str) -> str:
    """Return the name of a subject in `keys.limits_subject`."""
    return f"{kind}:{name.translate(_SPECIAL)}"


def budget_field(budget: Budget) -> str:
    """Return the field of what is spent in a budget's period. Budgets with the same periods share it."""
    return f"b:{budget.period}:{budget.time_zone}"


def raise_command(floors: Sequence[Floor]) -> tuple[str | int, ...]:
    """Return the Redis command that raises counters, at most MAX_FLOORS; its answer is a list with 1 for each that was
    raised, else 0. It may be sent twice."""
    return "EVAL", _script(), 1, keys.LIMITS, *(value for floor in floors for value in floor)


@cache
def _script() -> str:
    return Path(__file__).with_name("raise_counters.lua").read_text("utf-8")
