"""Answers `/admin/usage`: pages of calls, and sums. Exports are in `export.py`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from msgspec import Meta
from sqlalchemy import Row
from starlette.responses import Response

from accounts.access.mirror import read_currency
from accounts.api.api import USERS, AdminRequest, RouteRow, answer, read_query
from accounts.database.database import Database
from accounts.errors import Invalid
from accounts.protocol.usage import NANO
from accounts.usage.calls import COLUMNS, Place, read_page
from accounts.usage.query import Selection, calls_of, read_cursor, write_cursor
from accounts.usage.summary import DAY_S, GROUPS, TIMES, Summary, summarise

MAX_CALLS, MAX_GROUPS = 1000, 10_000


class CallsQuery(Selection, frozen=True, kw_only=True):
    """The query of a list of calls."""

    limit: Annotated[int, Meta(ge=1, le=MAX_CALLS)] = 100
    cursor: str = ""


class SummaryQuery(Selection, frozen=True, kw_only=True):
    """The query of sums."""

    group_by: str = ""
    limit: Annotated[int, Meta(ge=1, le=MAX_GROUPS)] = 1000
    cursor: str = ""


class UsageRoutes:
    """The handlers."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def rows(self) -> tuple[RouteRow, ...]:
        return (
            RouteRow("GET", "/admin/usage", USERS, self.list_calls, "calls, newest first", query=CallsQuery),
            RouteRow(
                "GET", "/admin/usage/summary", USERS, self.sum_up, "sums of calls, by time and more", query=SummaryQuery
            ),
        )

    def list_calls(self, request: AdminRequest) -> Response:
        """Answer a page of calls. Raises Invalid, Forbidden."""
        asked = read_query(request, CallsQuery)
        calls = calls_of(asked, request.caller)
        after = read_cursor(asked.cursor, Place) if asked.cursor else None
        with self._database.reading() as connection:
            page = read_page(connection, calls, asked.limit, after)
            currency = read_currency(connection)
        following = None if page.next is None else write_cursor(page.next)
        return answer({"data": [call_of(row) for row in page.rows], "next": following, "currency": currency})

    def sum_up(self, request: AdminRequest) -> Response:
        """Answer sums. Raises Invalid, Forbidden."""
        asked = read_query(request, SummaryQuery)
        groups = _groups_of(asked.group_by)
        calls = calls_of(asked, request.caller)
        if calls.begins_at is None:
            raise Invalid("`from` is missing: the date or time from which to sum up.", param="from")
        after = read_cursor(asked.cursor, tuple[str | int, ...]) if asked.cursor else None
        if after is not None and not _is_place_of(after, groups):
            raise Invalid("`cursor` is of a list with other groups. Leave it out.", param="cursor")
        with self._database.reading() as connection:
            summary = summarise(connection, calls, groups, time.time(), asked.limit, after)
            currency = read_currency(connection)
        following = write_cursor(tuple(summary.rows[-1][name] for name in groups)) if summary.is_cut else None
        shown = {"from": shown_time(summary.begins_at), "to": shown_time(summary.ends_at), "currency": currency}
        return answer({**shown, "data": _shown_rows(summary, groups), "next": following})


def call_of(row: Row[Any]) -> dict[str, Any]:
    """Return a row of `usage` as lists show it."""
    fields = row._mapping
    return {name: fields["cost_nano"] / NANO if name == "cost" else fields[name] for name in COLUMNS}


def _is_place_of(place: Sequence[str | int], groups: Sequence[str]) -> bool:
    """Return whether a cursor's values are those of these groups: times are numbers, the others texts."""
    return [isinstance(value, int) for value in place] == [name in TIMES for name in groups]


def _groups_of(text: str) -> tuple[str, ...]:
    groups = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in groups if name not in GROUPS]
    if unknown:
        raise Invalid(f"`group_by` can't be {unknown[0][:40]!r}. Give some of: {', '.join(GROUPS)}.", param="group_by")
    return groups


def _shown_rows(summary: Summary, groups: Sequence[str]) -> list[dict[str, Any]]:
    """Return the sums as answers have them: costs in the currency, times by ISO 8601."""
    rows: list[dict[str, Any]] = list(summary.rows)
    for row in rows:
        row["cost"] = row.pop("cost_nano") / NANO
    for name in set(TIMES) & set(groups):
        for row in rows:
            row[name] = shown_time(row[name])
    return rows


def shown_time(at: int) -> str:
    time = datetime.fromtimestamp(at, UTC)
    if at % DAY_S:
        return time.isoformat().replace("+00:00", "Z")
    return time.date().isoformat()
