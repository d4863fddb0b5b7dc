"""Lays out tables and cards of plain text, and writes numbers, money and times for people. All times are UTC.

Nothing that an answer holds can control the terminal that shows it.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

GAP = "  "
MIN_WIDTH = 8
"""Columns are made no narrower than this, however narrow the terminal is."""
CUT = "…"
HIDDEN = "\N{REPLACEMENT CHARACTER}"
INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of characters that are not shown as they are."""

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400

RowT = TypeVar("RowT")


@dataclass(frozen=True, slots=True)
class Column(Generic[RowT]):
    """A column of a table."""

    title: str
    text: Callable[[RowT], str]
    is_number: bool = False
    """Whether it is aligned to the right, and never cut."""
    is_always: bool = False
    """Whether it is shown even if it is empty in all rows."""


def table(columns: Sequence[Column[RowT]], rows: Iterable[RowT], width: int | None) -> str:
    """Return a table with a line of titles. Columns that are empty in all rows are left out.

    `width`: characters of the terminal's line, to which texts are cut; None: nothing is cut."""
    listed = list(rows)
    cells = [[clean(column.text(row)) for row in listed] for column in columns]
    shown = [(column, found) for column, found in zip(columns, cells, strict=True) if column.is_always or any(found)]
    widths = [max(map(width_of, (column.title, *found))) for column, found in shown]
    if width is not None:
        _fit(widths, [not column.is_number for column, _ in shown], width)
    lines = [[column.title for column, _ in shown], *([found[row] for _, found in shown] for row in range(len(listed)))]
    numbers = [column.is_number for column, _ in shown]
    return "\n".join(_line(line, widths, numbers) for line in lines)


def card(fields: Mapping[str, str]) -> str:
    """Return one line per field that is not empty: its name, and its text beside it."""
    told = {name: text for name, text in fields.items() if text}
    name_width = max(map(width_of, told), default=0)
    lines = []
    for name, text in told.items():
        first, *more = (clean(line) for line in text.split("\n"))
        lines.append(f"{_padded(name, name_width)}{GAP}{first}")
        lines += [f"{' ' * name_width}{GAP}{line}" for line in more]
    return "\n".join(lines)


def clean(text: str) -> str:
    """Return the text with every character replaced that is invisible or controls a terminal."""
    return "".join(HIDDEN if unicodedata.category(char) in INVISIBLE else char for char in text)


def width_of(text: str) -> int:
    """Return the number of places that a text takes in a terminal."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def _fit(widths: list[int], may_shrink: Sequence[bool], width: int) -> None:
    """Make the widest columns narrower, one place after the other, until the line fits or none may shrink."""
    while sum(widths) + len(GAP) * (len(widths) - 1) > width:
        wide = [place for place, found in enumerate(widths) if may_shrink[place] and found > MIN_WIDTH]
        if not wide:
            return
        widths[max(wide, key=lambda place: widths[place])] -= 1


def _line(cells: Sequence[Any], widths: Sequence[int], numbers: Sequence[bool]) -> str:
    parts = []
    for cell, width, is_number in zip(cells, widths, numbers, strict=True):
        text = _cut(cell, width)
        parts.append(" " * (width - width_of(text)) + text if is_number else _padded(text, width))
    return GAP.join(parts).rstrip()


def _cut(text: str, width: int) -> str:
    if width_of(text) <= width:
        return text
    while text and width_of(text) >= width:
        text = text[:-1]
    return text + CUT


def _padded(text: str, width: int) -> str:
    return text + " " * (width - width_of(text))


def write_number(value: float | None) -> str:
    """Return a number with its thousands apart; empty for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def write_size(value: int | None) -> str:
    """Return a number of bytes by the largest unit that leaves it whole, or with one decimal; empty for None."""
    if value is None:
        return ""
    for unit, factor in (("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if value >= factor:
            return f"{write_number(round(value / factor, 1))}{unit}"
    return write_number(value)


def write_money(value: float | None) -> str:
    """Return an amount with two decimals, or with as many as a small one needs; empty for None."""
    if value is None:
        return ""
    if value == 0 or abs(value) >= 1:
        return f"{value:,.2f}"
    text = f"{value:.6f}".rstrip("0")
    return f"{value:.2f}" if len(text) < 5 else text


def write_time(at: float | None) -> str:
    """Return a unix time as people read it; empty for None."""
    return "" if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}Z"


def write_iso(text: str) -> str:
    """Return a time of the API's as people read it."""
    return f"{text[:16].replace('T', ' ')}Z" if "T" in text else text


def write_span(seconds: float) -> str:
    """Return a duration by its largest unit."""
    for unit_s, name, least in ((DAY_S, "d", 2), (HOUR_S, "h", 2), (MINUTE_S, "min", 1)):
        if seconds >= least * unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{seconds:.0f} s"


def write_distance(at: float | None) -> str:
    """Return how far a unix time is from now, such as `3 h ago` or `in 30 d`; empty for None."""
    if at is None:
        return ""
    distance = at - time.time()
    return f"in {write_span(distance)}" if distance > 0 else f"{write_span(-distance)} ago"


def write_list(names: Sequence[str] | None, everything: str = "all") -> str:
    """Return names that commas separate. `everything`: the text for None, which stands for no restriction."""
    if names is None:
        return everything
    return ", ".join(names) if names else "none"


def is_over(at: float | None) -> bool:
    """Return whether a unix time lies in the past; None never does."""
    return at is not None and at <= time.time()
