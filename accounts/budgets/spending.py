"""Adds up what subjects have used and spent in a period.

Sums per month, day and hour are taken as far as they lie wholly in the period. In time zones that are half an hour off,
periods begin within an hour: the calls of that part are added up one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Connection, Select, cast, func, select

from accounts.database.database import united
from accounts.database.schema import usage, usage_hours
from accounts.protocol.periods import Span
from accounts.protocol.records import SubjectKind
from accounts.usage.summary import HOUR_S, Piece, cut_range

MAX_NAMES = 500
"""Names that one query asks for."""
COARSE: frozenset[SubjectKind] = frozenset({"organisation", "team"})
"""Kinds of subject that the sums per day and month know."""


class Spending(NamedTuple):
    """The use of a subject: prompt and completion tokens together, and billionths of the currency's unit."""

    num_tokens: int
    cost_nano: int


NOTHING_SPENT = Spending(0, 0)


def read_spending(
    connection: Connection, kind: SubjectKind, span: Span, names: Collection[str] | None = None
) -> Mapping[str, Spending]:
    """Return the spending of subjects of one kind in a period; those that have used nothing are left out.

    `names`: None stands for all subjects."""
    if names is None:
        return dict(_read(connection, kind, span, None))
    ordered, found = sorted(names), dict[str, Spending]()
    for first in range(0, len(ordered), MAX_NAMES):
        found.update(_read(connection, kind, span, ordered[first : first + MAX_NAMES]))
    return found


def _read(
    connection: Connection, kind: SubjectKind, span: Span, names: Collection[str] | None
) -> Iterator[tuple[str, Spending]]:
    selected = [_of_piece(piece, kind, names) for piece in _whole_pieces(kind, span)]
    selected += [_of_calls(begin, end, kind, names) for begin, end in _parts_of_hours(span)]
    parts = united(selected).subquery()
    sums = (cast(func.sum(column), BigInteger) for column in (parts.c.num_tokens, parts.c.cost_nano))
    for row in connection.execute(select(parts.c.subject, *sums).group_by(parts.c.subject)):
        yield str(row[0]), Spending(int(row[1]), int(row[2]))


def _whole_pieces(kind: SubjectKind, span: Span) -> Iterator[Piece]:
    first, last = -(-span.begins_at // HOUR_S) * HOUR_S, span.ends_at // HOUR_S * HOUR_S
    if kind in COARSE:
        yield from cut_range(first, last, has_months=True)
    else:
        yield Piece(usage_hours, first, last)


def _parts_of_hours(span: Span) -> Iterator[tuple[int, int]]:
    """Yield the parts at the begin and end of a period that are no whole hours."""
    if span.begins_at % HOUR_S:
        yield span.begins_at, -(-span.begins_at // HOUR_S) * HOUR_S
    if span.ends_at % HOUR_S:
        yield span.ends_at // HOUR_S * HOUR_S, span.ends_at


def _of_piece(piece: Piece, kind: SubjectKind, names: Collection[str] | None) -> Select[Any]:
    columns = piece.table.c
    tokens = (columns.prompt_tokens + columns.completion_tokens).label("num_tokens")
    of_names = () if names is None else (columns[kind].in_(names),)
    return select(columns[kind].label("subject"), tokens, columns.cost_nano).where(piece.is_in(), *of_names)


def _of_calls(begins_at: int, ends_at: int, kind: SubjectKind, names: Collection[str] | None) -> Select[Any]:
    tokens = (usage.c.prompt_tokens + usage.c.completion_tokens).label("num_tokens")
    of_time = (usage.c.ended_at >= begins_at, usage.c.ended_at < ends_at)
    of_names = () if names is None else (usage.c[kind].in_(names),)
    return select(usage.c[kind].label("subject"), tokens, usage.c.cost_nano).where(*of_time, *of_names)
