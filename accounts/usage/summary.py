"""Sums up usage over a time, in groups, from the roll-ups. It never reads single calls.

A range is cut into whole months, days and hours, so that few sums are added up: of a month by team and model, one row
for each. Keys, users, aliases and adapters are in the sums per hour alone; end users in sums of their own, per day.
Hours, days and months are those of UTC.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    FromClause,
    Select,
    Table,
    and_,
    func,
    literal,
    select,
    tuple_,
)
from sqlalchemy import cast as cast_to

from accounts.database.database import united
from accounts.database.schema import usage_days, usage_end_users, usage_hours, usage_months
from accounts.errors import Invalid
from accounts.usage.query import Calls

HOUR_S, DAY_S = 3600, 86_400
TIMES = ("hour", "day", "month")
GROUPS = (*TIMES, "organisation", "team", "key", "user", "alias", "model", "adapter", "end_user")
SUMS = (
    *("num_calls", "num_failed", "prompt_tokens", "cached_tokens", "completion_tokens", "media_tokens"),
    *("queue_ms", "compute_ms", "cost_nano"),
)
COARSE = frozenset({"organisation", "team", "model"})
"""Groups of the sums per day and month."""
FINE = COARSE | {"key", "user", "alias", "adapter"}
OF_END_USERS = frozenset({"team", "end_user"})


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a range, answered by one table of sums: from a time, and before another, both in unix seconds."""

    table: Table
    begins_at: int
    ends_at: int

    def is_in(self) -> ColumnElement[bool]:
        """Return the condition that a row is in the piece."""
        time: Column[int] = self.table.primary_key.columns[0]
        if time.name == "month" and month_end(self.begins_at + 1) == self.ends_at:
            return time == self.begins_at  # an order of the index is one of a single month
        return and_(time >= self.begins_at, time < self.ends_at)


@dataclass(frozen=True, slots=True)
class Summary:
    """Sums over a range, which was widened to whole hours, days or months, in the order of the groups."""

    begins_at: int
    ends_at: int
    rows: Sequence[dict[str, str | int]]
    """Names of the groups and of `SUMS` -> values. Times are unix seconds."""
    is_cut: bool
    """Whether there are more groups."""


def summarise(
    connection: Connection,
    calls: Calls,
    groups: Sequence[str],
    now: float,
    limit: int,
    after: tuple[str | int, ...] | None = None,
) -> Summary:
    """Return the sums of calls, at most `limit` groups after a group. `calls` has a begin. Raises Invalid."""
    begins_at, ends_at = int(calls.begins_at or 0), int(-(-(calls.ends_at or now) // 1))
    pieces = _pieces(calls, groups, begins_at, ends_at, now)
    selected = [_part(piece, calls, groups) for piece in pieces]
    parts = united(selected).subquery()
    keys = [parts.c[name] for name in groups]
    sums = [cast_to(func.coalesce(func.sum(parts.c[name]), 0), BigInteger).label(name) for name in SUMS]
    columns: list[ColumnElement[Any]] = [*keys, *sums]
    asked = select(*columns).group_by(*keys).order_by(*keys).limit(limit + 1)
    if after is not None and keys:
        asked = asked.where(tuple_(*keys) > after)
    names = (*groups, *SUMS)
    rows = [dict(zip(names, row, strict=True)) for row in connection.execute(asked)]
    begins_at, ends_at = min(piece.begins_at for piece in pieces), max(piece.ends_at for piece in pieces)
    return Summary(begins_at, ends_at, rows[:limit], len(rows) > limit)


def _pieces(calls: Calls, groups: Sequence[str], begins_at: int, ends_at: int, now: float) -> tuple[Piece, ...]:
    names = {*calls.equal, *groups} - set(TIMES)
    if calls.is_failed or names & {"outcome", "request_id"}:
        raise Invalid("Sums are not kept by outcome or request; each has `num_failed`. List the calls instead.")
    if "end_user" in names:
        if not names <= OF_END_USERS or {"hour", "month"} & set(groups):
            raise Invalid("Sums of end users are kept by day and team only. List or export the calls instead.")
        return (Piece(usage_end_users, begins_at // DAY_S * DAY_S, -(-ends_at // DAY_S) * DAY_S),)
    if "month" in groups:
        if {"hour", "day"} & set(groups) or not names <= COARSE:
            raise Invalid("Sums per month are kept by organisation, team and model only. Group by day or hour instead.")
        return (Piece(usage_months, month_begin(begins_at), month_end(ends_at)),)
    begins_at, ends_at = begins_at // HOUR_S * HOUR_S, -(-ends_at // HOUR_S) * HOUR_S
    if "hour" in groups or not names <= COARSE:
        return (Piece(usage_hours, begins_at, ends_at),)
    if ends_at > now:
        ends_at = -(-ends_at // DAY_S) * DAY_S  # nothing has ended later than now
    return tuple(cut_range(begins_at, ends_at, has_months="day" not in groups))


def cut_range(begins_at: int, ends_at: int, *, has_months: bool) -> Iterator[Piece]:
    """Yield the pieces of a range of whole hours: as many whole months and days as are in it, and the hours beside."""
    first, last = -(-begins_at // DAY_S) * DAY_S, ends_at // DAY_S * DAY_S
    if first >= last:
        yield Piece(usage_hours, begins_at, ends_at)
        return
    if begins_at < first:
        yield Piece(usage_hours, begins_at, first)
    if last < ends_at:
        yield Piece(usage_hours, last, ends_at)
    first_month, last_month = month_end(first), month_begin(last)
    if not has_months or first_month >= last_month:
        yield Piece(usage_days, first, last)
        return
    yield Piece(usage_months, first_month, last_month)
    if first < first_month:
        yield Piece(usage_days, first, first_month)
    if last_month < last:
        yield Piece(usage_days, last_month, last)


def month_begin(at: float) -> int:
    """Return the unix time at which the month (UTC) of a moment begins."""
    time = datetime.fromtimestamp(at, UTC)
    return int(datetime(time.year, time.month, 1, tzinfo=UTC).timestamp())


def month_end(at: int) -> int:
    """Return the first begin of a month (UTC) that is not before a moment."""
    begin = month_begin(at)
    return begin if begin == at else month_begin(begin + 31 * DAY_S)


def _part(piece: Piece, calls: Calls, groups: Sequence[str]) -> Select[Any]:
    table = piece.table
    columns = [_day_of(table).label(name) if name == "day" else table.c[name].label(name) for name in groups]
    conditions = [table.c[name] == value for name, value in calls.equal.items()]
    return select(*columns, *(table.c[name] for name in SUMS)).where(piece.is_in(), *conditions)


def _day_of(table: FromClause) -> ColumnElement[int]:
    return table.c.day if "day" in table.c else table.c.hour - table.c.hour % literal(DAY_S, literal_execute=True)
