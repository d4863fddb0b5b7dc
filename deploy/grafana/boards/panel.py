"""What one panel of a board shows, in Paddock's words; `shapes.py` says it in Grafana's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Shape(StrEnum):
    """Grafana's names of the kinds of panels."""

    LINES = "timeseries"
    FIGURE = "stat"
    TABLE = "table"
    HEAT = "heatmap"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of PromQL."""

    expr: str
    legend: str = ""
    """Of a line: Grafana's `{{label}}`; of a table: the column's title."""


@dataclass(frozen=True, slots=True)
class Step:
    """From `value` on the panel has this colour."""

    value: float
    color: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; `unit` is one of Grafana's, such as `s`, `percentunit`, `bytes`, or `suffix: tok/s`."""

    title: str
    description: str
    queries: tuple[Query, ...] = ()
    unit: str = "short"
    shape: Shape = Shape.LINES
    width: int = 8
    """Of 24."""
    height: int = 8
    steps: tuple[Step, ...] = ()
    """Rising; below the first the panel is green."""
    stacked: bool = False
    maximum: float | None = None
    decimals: int | None = None
    units: tuple[tuple[str, str], ...] = ()
    """Of a table: column -> its unit, where it is another."""
    text: str = ""
    """Of a text panel: Markdown."""


@dataclass(frozen=True, slots=True)
class Row:
    """A titled line of panels, as wide as they need."""

    title: str
    panels: tuple[Panel, ...]


def figure(
    title: str, description: str, expr: str, *, unit: str = "short", steps: tuple[Step, ...] = (), width: int = 3
) -> Panel:
    """One number, coloured by its steps."""
    return Panel(title, description, (Query(expr, title),), unit, Shape.FIGURE, width, 4, steps)
