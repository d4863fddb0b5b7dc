"""Finds pages of calls in the ledger. A page takes a bounded time, however many calls there are.

The calls of one column's value lie in an index in the order of their end. Where several columns are asked for, the
index is used whose value is the rarest, and what else is asked is looked up in its rows. That looks at no more than
MAX_SCANNED rows; a page that ends there may have fewer calls than were asked for, or none, and tells where to go on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, Select, literal_column, select, tuple_

from accounts.database.schema import MOSTLY, usage
from accounts.protocol.usage import LEFT
from accounts.usage.query import Calls

MAX_SCANNED = 20_000
SEARCH_S = 0.4
"""Seconds after which a page that is not full looks no further."""
COLUMNS = (
    *("id", "request_id", "started_at", "ended_at", "route", "outcome", "status", "organisation", "team", "key"),
    *("user", "end_user", "alias", "model", "adapter", "prompt_tokens", "cached_tokens", "completion_tokens"),
    *("media_tokens", "queue_ms", "compute_ms", "cost", "trace_id"),
)
"""Fields of a call, as lists and exports have them. `cost` is in the currency of the price list."""

OK = "ok"
"""Outcome of the calls that did not fail."""
INDEXED = ("request_id", "key", "user", "end_user", "team", "alias", "model")
"""Columns with an index of their own; `outcome` has one of the calls that failed."""


ORDER = (usage.c.ended_at, usage.c.id)
NOTHING: ColumnElement[str] = literal_column("''")


class Place(NamedTuple):
    """The place of a call in the order of their ends."""

    ended_at: float
    id: int


@dataclass(frozen=True, slots=True)
class CallPage:
    """Calls in their order, as rows of `usage`. `next`: the last place that was looked at; None: there are no more."""

    rows: Sequence[Row[Any]]
    next: Place | None


def read_page(
    connection: Connection, calls: Calls, limit: int, after: Place | None = None, *, newest_first: bool = True
) -> CallPage:
    """Return the calls that come after a place, at most `limit`."""
    scan = _Scan(connection, calls, newest_first)
    rows: list[Row[Any]] = []
    due = time.monotonic() + SEARCH_S
    while True:
        page = scan.read(limit - len(rows), after)
        rows += page.rows
        after = page.next
        if after is None or len(rows) == limit or time.monotonic() > due:
            return CallPage(rows, after)


class _Scan:
    """Reads calls in one direction."""

    def __init__(self, connection: Connection, calls: Calls, newest_first: bool) -> None:
        self._connection = connection
        self._calls = calls
        self._newest_first = newest_first
        self._here = tuple_(*ORDER)
        self._of_time = tuple(_time_conditions(calls))
        self._indexed = [name for name in INDEXED if name in calls.equal]
        if calls.equal.get("outcome", OK) != OK:
            self._indexed.append("outcome")
        self._is_of_one_column = len(calls.equal) == len(self._indexed) == 1 and not calls.is_failed
        self._is_of_all = not calls.equal and not calls.is_failed

    def read(self, limit: int, after: Place | None) -> CallPage:
        """Return at most `limit` calls after a place, of the next MAX_SCANNED rows of an index."""
        end: Place | None = None
        index = self._indexed[0] if self._indexed else ""
        if not self._is_of_one_column and not self._is_of_all:
            index, end = self._rarest(after)
        others = [_looked_up(name, value) for name, value in self._calls.equal.items() if name != index]
        if self._calls.is_failed:
            others.append(usage.c.outcome.not_in((OK, *sorted(LEFT))))
        asked = select(usage).where(*self._in_index(index, after), *self._up_to(end), *others)
        rows = self._connection.execute(self._ordered(asked).limit(limit + 1)).all()
        if len(rows) > limit:
            return CallPage(rows[:limit], _place(rows[limit - 1]))
        return CallPage(rows, end)

    def _rarest(self, after: Place | None) -> tuple[str, Place | None]:
        """Return the column whose index reaches furthest in MAX_SCANNED rows, and the last of these; None: its end.

        The index of an empty column has all calls."""
        reached: dict[str, Place] = {}
        for name in self._indexed or [""]:
            places = select(usage.c.ended_at, usage.c.id).where(*self._in_index(name, after))
            last = self._connection.execute(self._ordered(places).offset(MAX_SCANNED - 1).limit(1)).first()
            if last is None:
                return name, None
            reached[name] = _place(last)
        furthest = (min if self._newest_first else max)(reached, key=lambda name: reached[name])
        return furthest, reached[furthest]

    def _in_index(self, name: str, after: Place | None) -> Iterator[ColumnElement[bool]]:
        """Yield the conditions that an index answers: a column's value, the time, the place to go on from."""
        if name:
            yield usage.c[name] == self._calls.equal[name]
        if name in MOSTLY:
            yield MOSTLY[name]
        yield from self._of_time
        if after is not None:
            yield self._here < after if self._newest_first else self._here > after

    def _up_to(self, place: Place | None) -> Iterator[ColumnElement[bool]]:
        if place is not None:
            yield self._here >= place if self._newest_first else self._here <= place

    def _ordered(self, asked: Select[Any]) -> Select[Any]:
        return asked.order_by(*(column.desc() if self._newest_first else column.asc() for column in ORDER))


def _place(row: Row[Any]) -> Place:
    return Place(row.ended_at, row.id)


def _time_conditions(calls: Calls) -> Iterator[ColumnElement[bool]]:
    if calls.begins_at is not None:
        yield usage.c.ended_at >= calls.begins_at
    if calls.ends_at is not None:
        yield usage.c.ended_at < calls.ends_at


def _looked_up(name: str, value: str) -> ColumnElement[bool]:
    """Return the condition that a column has a value, in a form for which no database uses the column's index."""
    return usage.c[name].concat(NOTHING) == value
