"""Exports calls as CSV or Parquet: a stream of pieces, oldest calls first, however many there are.

Each piece is made of a page of calls, read in a transaction of its own: a client that reads slowly holds neither memory
nor a connection, and does not keep the database from tidying up. Calls that are written after the export began are left
out, unless their end lies before what was read last; `to` cuts a range off that no longer changes.
"""

from __future__ import annotations

import csv
import io
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from importlib import import_module
from typing import Any, Literal

from sqlalchemy import Row
from starlette.responses import Response, StreamingResponse

from accounts.api.api import USERS, AdminRequest, RouteRow, read_query
from accounts.database.database import Database
from accounts.database.schema import usage
from accounts.usage.calls import COLUMNS, Place, read_page
from accounts.usage.query import Calls, Selection, calls_of

PAGE_CALLS = 5000
CSV, PARQUET = "csv", "parquet"
MEDIA_TYPES = {CSV: "text/csv; charset=utf-8", PARQUET: "application/vnd.apache.parquet"}
TEXTS = frozenset(
    {"request_id", "route", "outcome", "organisation", "team", "key", "user", "end_user", "alias", "model", "adapter"}
)
FORMULAS = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of texts that spreadsheets compute. Callers choose some of the texts: an apostrophe disarms them."""


class ExportQuery(Selection, frozen=True, kw_only=True):
    """The query of an export."""

    format: Literal["csv", "parquet"] = "csv"


class ExportRoutes:
    """The handler of exports."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def rows(self) -> tuple[RouteRow, ...]:
        about = "calls as CSV or Parquet, streamed"
        return (RouteRow("GET", "/admin/usage/export", USERS, self.export, about, query=ExportQuery),)

    def export(self, request: AdminRequest) -> Response:
        """Answer with a stream of calls. Raises Invalid, Forbidden."""
        asked = read_query(request, ExportQuery)
        calls = calls_of(asked, request.caller)
        pages = self._pages(calls)
        if asked.format == PARQUET:
            pieces: Iterator[bytes] = import_module("accounts.usage.parquet").write(COLUMNS, _parquet_rows(pages))
        else:
            pieces = _csv(pages)
        first = next(pieces)  # a database that is away is told by the status
        name = f"paddock-usage-{datetime.now(UTC):%Y%m%d-%H%M%S}.{asked.format}"
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return StreamingResponse(
            itertools.chain((first,), pieces), media_type=MEDIA_TYPES[asked.format], headers=headers
        )

    def _pages(self, calls: Calls) -> Iterator[Sequence[Row[Any]]]:
        """Yield all calls, in pages that may be empty."""
        if calls.ends_at is None:
            calls = Calls(calls.begins_at, time.time(), calls.equal, calls.is_failed)
        after: Place | None = None
        while True:
            with self._database.reading() as connection:
                page = read_page(connection, calls, PAGE_CALLS, after, newest_first=False)
            yield page.rows
            after = page.next
            if after is None:
                return


def _csv(pages: Iterator[Sequence[Row[Any]]]) -> Iterator[bytes]:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for page in pages:
        writer.writerows([[write(row[place]) for place, write in CSV_COLUMNS] for row in page])
        yield text.getvalue().encode()
        text.seek(0)
        text.truncate()


def _parquet_rows(pages: Iterator[Sequence[Row[Any]]]) -> Iterator[Sequence[Sequence[Any]]]:
    for page in pages:
        yield [[write(row[place]) for place, write in PARQUET_COLUMNS] for row in page]


def _money(cost_nano: int) -> Decimal:
    return Decimal(cost_nano).scaleb(-9)


def _time(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def _time_text(at: float) -> str:
    return _time(at).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _harmless(value: str) -> str:
    return f"'{value}" if value.startswith(FORMULAS) else value


def _same(value: Any) -> Any:
    return value


def _columns(writers: Mapping[str, Callable[[Any], Any]]) -> tuple[tuple[int, Callable[[Any], Any]], ...]:
    """Return the place of each column in a row of `usage`, and how its value is written."""
    places = {column.name: place for place, column in enumerate(usage.columns)}
    return tuple((places["cost_nano" if name == "cost" else name], writers.get(name, _same)) for name in COLUMNS)


CSV_COLUMNS = _columns(
    {
        **dict.fromkeys(TEXTS, _harmless),
        "started_at": _time_text,
        "ended_at": _time_text,
        "cost": lambda cost: f"{_money(cost):f}",
    }
)
PARQUET_COLUMNS = _columns({"started_at": _time, "ended_at": _time, "cost": _money})
