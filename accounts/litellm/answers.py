"""Writes records by LiteLLM's field names."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection

from accounts.access.keys import Key
from accounts.access.records import RecordT, Stored
from accounts.budgets.spending import NOTHING_SPENT, read_spending
from accounts.litellm import bodies
from accounts.litellm.bodies import Form
from accounts.protocol import periods
from accounts.protocol.periods import span_at
from accounts.protocol.records import Limits, Period, SubjectKind, TeamRecord, UserRecord
from accounts.protocol.usage import NANO

READ_AT_ONCE = 1000
MAX_KEYS_SHOWN = 1000
"""Maximum number of keys that the answers about a team or user list."""
_LENGTHS: Mapping[Period, str] = {"day": "1d", "week": "7d", "month": "30d"}
_ROLES = {is_admin: role for role, is_admin in bodies.ROLES.items()}


class Page(NamedTuple):
    """One page of a list whose pages have numbers, from 1."""

    shown: Sequence[Any]
    num_all: int
    num_pages: int


def page_of(found: Sequence[Any], number: int, size: int) -> Page:
    return Page(found[(number - 1) * size : number * size], len(found), -(-len(found) // size))


def read_all(read_page: Callable[[str, int], list[Stored[RecordT]]]) -> list[Stored[RecordT]]:
    """Return all records that a caller may see. `read_page`: returns those after a name, up to a number.

    LiteLLM's pages have numbers, so that the pages before are read as well; a script lists few."""
    found = list[Stored[RecordT]]()
    while page := read_page(found[-1].record.name if found else "", READ_AT_ONCE):
        found += page
    return found


def shown_key(connection: Connection, key: Key) -> dict[str, Any]:
    """Return a key. `token` is its name, since its hash is not shown; so is `key_name`, which at LiteLLM has the last
    characters of the key: they are not kept."""
    record = key.record
    return {
        "token": record.name,
        "key_name": record.name,
        "key_alias": record.name,
        "spend": _spend_of(connection, "key", record.name, record.limits),
        "expires": _shown_time(record.expires_at),
        "models": list(record.aliases or ()),
        "user_id": record.user or None,
        "team_id": record.team,
        **_notes(key, bodies.KEY, {"tags": []}),
        "blocked": record.blocked,
        **_shown_limits(record.limits),
        **_times(key),
        "created_by": key.created_by,
        "last_active": _shown_time(key.last_used_at),
    }


def shown_team(connection: Connection, team: Stored[TeamRecord]) -> dict[str, Any]:
    record = team.record
    return {
        "team_id": record.name,
        "organization_id": record.organisation,
        "models": list(record.aliases or ()),
        **_notes(team, bodies.TEAM, {"tags": [], bodies.TEAM_ALIAS: record.name}),
        "blocked": record.blocked,
        "spend": _spend_of(connection, "team", record.name, record.limits),
        **_shown_limits(record.limits),
        **_times(team),
    }


def shown_user(connection: Connection, user: Stored[UserRecord]) -> dict[str, Any]:
    record = user.record
    return {
        "user_id": record.name,
        "user_email": user.email or None,
        "user_role": _ROLES[record.admin],
        "teams": list(record.teams),
        **_notes(user, bodies.USER, {bodies.USER_ALIAS: None}),
        "blocked": record.blocked,
        "spend": _spend_of(connection, "user", record.name, record.limits),
        **_shown_limits(record.limits),
        **_times(user),
    }


def _notes(stored: Stored[Any], form: Form, blank: Mapping[str, object]) -> dict[str, Any]:
    """Return the metadata, and the notes that are kept there. `blank`: the notes that a record has without any."""
    metadata = {name: value for name, value in stored.metadata.items() if name not in form.notes}
    return {**{name: stored.metadata.get(name) or blank[name] for name in form.notes}, "metadata": metadata}


def _spend_of(connection: Connection, kind: SubjectKind, name: str, limits: Limits) -> float:
    """Return what was spent in the running period of the first budget; without one, in this month."""
    budget = limits.budgets[0] if limits.budgets else None
    span = span_at(budget.period if budget else "month", budget.time_zone if budget else periods.UTC, time.time())
    found = read_spending(connection, kind, span, [name]).get(name, NOTHING_SPENT)
    return found.cost_nano / NANO


def _shown_limits(limits: Limits) -> dict[str, Any]:
    shown = {theirs: getattr(limits, ours) for theirs, ours in bodies.LIMITS.items()}
    budget = limits.budgets[0] if limits.budgets else None
    if budget is None:
        return {**shown, **dict.fromkeys(bodies.BUDGET)}
    soft = budget.amount * budget.warn_at[0] if budget.warn_at and budget.warn_at[0] < 1 else None
    return {
        **shown,
        bodies.MAX_BUDGET: budget.amount if budget.refuses else None,
        bodies.SOFT_BUDGET: soft if budget.refuses else budget.amount,
        bodies.BUDGET_DURATION: _LENGTHS[budget.period],
    }


def _times(stored: Stored[Any]) -> dict[str, str | None]:
    return {"created_at": _shown_time(stored.created_at), "updated_at": _shown_time(stored.updated_at)}


def _shown_time(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat()
