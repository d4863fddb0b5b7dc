"""Answers `/admin/budgets`: what each budget has spent, what is left, and when it renews; and a test of the webhook."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from sqlalchemy import ColumnElement, Connection, or_, select
from starlette.responses import Response

from accounts.access.mirror import read_currency
from accounts.api.api import ADMINS, USERS, AdminRequest, RouteRow, answer, read_query
from accounts.budgets.spending import NOTHING_SPENT, read_spending
from accounts.budgets.watch import PATTERN, TABLES, limits_of
from accounts.budgets.webhooks import Event, Target, store_event
from accounts.database.database import Database
from accounts.database.schema import api_keys, teams, users
from accounts.errors import Forbidden, Invalid
from accounts.protocol.caller import Caller
from accounts.protocol.periods import Span, span_at
from accounts.protocol.records import Budget, SubjectKind
from accounts.protocol.usage import NANO
from accounts.usage.query import read_cursor, write_cursor

MAX_SUBJECTS = 1000
TEST = "test"
"""Type of the event that `/admin/webhooks/test` sends."""


class BudgetsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of a list of budgets."""

    kind: Literal["", "organisation", "team", "user", "key", "alias"] = ""
    name: Annotated[str, Meta(max_length=256)] = ""
    limit: Annotated[int, Meta(ge=1, le=MAX_SUBJECTS)] = 100
    """Maximum number of subjects; each may have several budgets."""
    cursor: str = ""


@dataclass(frozen=True, slots=True)
class BudgetRoutes:
    """The handlers."""

    database: Database
    target: Target | None
    """The receiver of events; None: there is none."""

    def rows(self) -> tuple[RouteRow, ...]:
        test = "stores an event for the webhook, to see whether it arrives"
        return (
            RouteRow(
                "GET", "/admin/budgets", USERS, self.list_budgets, "budgets: spent, left, renewal", query=BudgetsQuery
            ),
            RouteRow("POST", "/admin/webhooks/test", ADMINS, self.test_webhook, test, status=202),
        )

    def list_budgets(self, request: AdminRequest) -> Response:
        """Answer with budgets that the caller may see, by their subjects. Raises Invalid, Forbidden."""
        asked = read_query(request, BudgetsQuery)
        after = read_cursor(asked.cursor, tuple[str, str]) if asked.cursor else ("", "")
        with self.database.reading() as connection:
            subjects = _page(connection, request.caller, asked, after)
            shown = [budget for kind, of in subjects.items() for budget in _shown(connection, kind, of)]
            currency = read_currency(connection)
        last = [(kind, name) for kind, of in subjects.items() for name in of][-1:]
        is_full = sum(map(len, subjects.values())) == asked.limit
        following = write_cursor(last[0]) if is_full else None
        return answer({"currency": currency, "data": shown, "next": following})

    def test_webhook(self, request: AdminRequest) -> Response:
        """Store an event for the webhook. Raises Invalid."""
        if self.target is None:
            raise Invalid("There is no webhook. Set PADDOCK_WEBHOOK_URL and PADDOCK_WEBHOOK_SECRET.")
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        with self.database.transaction() as connection:
            store_event(connection, Event(type=TEST, timestamp=now, data={"asked_by": request.caller.key}))
        return answer({"stored": True, "receiver": self.target.shown}, 202)


def _page(
    connection: Connection, caller: Caller, asked: BudgetsQuery, after: tuple[str, str]
) -> Mapping[SubjectKind, Mapping[str, tuple[Budget, ...]]]:
    """Return the next subjects with budgets: kind -> name -> budgets. Kinds are in the order of the alphabet."""
    found: dict[SubjectKind, dict[str, tuple[Budget, ...]]] = {}
    num_left = asked.limit
    for kind in sorted(TABLES):
        if (asked.kind and kind != asked.kind) or kind < after[0]:
            continue
        columns = TABLES[kind].c
        where = [columns.record.like(PATTERN), *_may_see(caller, kind)]
        if asked.name:
            where.append(columns.name == asked.name)
        if kind == after[0]:
            where.append(columns.name > after[1])
        rows = connection.execute(
            select(columns.name, columns.record).where(*where).order_by(columns.name).limit(num_left)
        ).all()
        if rows:
            found[kind] = {row.name: limits_of(row.record).budgets for row in rows}
        num_left -= len(rows)
        if not num_left:
            break
    return found


def _may_see(caller: Caller, kind: SubjectKind) -> Iterator[ColumnElement[bool]]:
    """Yield the conditions of a caller's role: a manager sees its own team and its keys, a user what is its own."""
    if caller.role == "admin":
        return
    nothing = TABLES[kind].c.name.in_(())
    if caller.role == "manager":
        if not caller.team:
            raise Forbidden("The caller has no team, and so no budgets of its own. Ask an admin.")
        yield {"team": teams.c.name == caller.team, "key": api_keys.c.team == caller.team}.get(kind, nothing)
    elif kind == "user" and caller.user:
        yield users.c.name == caller.user
    elif kind == "key" and caller.user:
        yield or_(api_keys.c.user == caller.user, api_keys.c.name == caller.key)
    elif kind == "key":
        yield api_keys.c.name == caller.key
    else:
        yield nothing


def _shown(
    connection: Connection, kind: SubjectKind, subjects: Mapping[str, tuple[Budget, ...]]
) -> Iterator[dict[str, Any]]:
    """Yield the budgets of subjects of one kind, with what is spent by what is written."""
    now = time.time()
    spans: dict[Span, set[str]] = {}
    for name, budgets in subjects.items():
        for budget in budgets:
            spans.setdefault(span_at(budget.period, budget.time_zone, now), set()).add(name)
    spent = {span: read_spending(connection, kind, span, names) for span, names in spans.items()}
    for name, budgets in subjects.items():
        for budget in budgets:
            span = span_at(budget.period, budget.time_zone, now)
            yield _budget(kind, name, budget, span, spent[span].get(name, NOTHING_SPENT).cost_nano)


def _budget(kind: SubjectKind, name: str, budget: Budget, span: Span, spent_nano: int) -> dict[str, Any]:
    spent = spent_nano / NANO
    return {
        "kind": kind,
        "name": name,
        "period": budget.period,
        "time_zone": budget.time_zone,
        "amount": budget.amount,
        "spent": spent,
        "left": max(0.0, budget.amount - spent),
        "share": spent / budget.amount,
        "warn_at": budget.warn_at,
        "refuses": budget.refuses,
        "is_refusing": budget.refuses and spent >= budget.amount,
        "begins_at": _time(span.begins_at),
        "renews_at": _time(span.ends_at),
    }


def _time(at: int) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
