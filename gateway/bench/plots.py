"""Draws plots as SVG, with the CSS classes of the HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil, floor, log10

WIDE, NARROW, HEIGHT = 620, 420, 268
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 14, 40
INNER_H = HEIGHT - TOP - BOTTOM
FACTORS = ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5), (1, 2, 5), (1, 3), (1,))
MOST_TICKS = 6
"""Maximum number of ticks on a logarithmic axis."""
LETTER_PX, LETTERS_APART = 7.5, 1.5
"""Width of a letter of a tick's label, and the least space between two labels, in letters."""
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot. `tone`: one of the page's colours, 1 to 4. `filled`: the area below the line is coloured."""

    name: str
    tone: int
    points: Sequence[Point]
    filled: bool = False
    stepped: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a plot. `ticks`: values and their labels. `place` maps a value to a position from 0 to 1."""

    ticks: tuple[tuple[float, str], ...]
    place: Callable[[float], float]
    label: str


@dataclass(frozen=True, slots=True)
class Axes:
    """Both axes and the width of a plot. Maps values to coordinates in the drawing."""

    x: Axis
    y: Axis
    width: int = WIDE

    @property
    def inner(self) -> int:
        return self.width - LEFT - RIGHT

    def across(self, value: float) -> float:
        return LEFT + self.inner * self.x.place(value)

    def down(self, value: float) -> float:
        return TOP + INNER_H * (1 - self.y.place(value))


@dataclass(frozen=True, slots=True)
class Mark:
    """A labelled point of a plot."""

    x: float
    y: float
    text: str


def plot(lines: Sequence[Line], axes: Axes, title: str, marks: Sequence[Mark] = ()) -> str:
    middle = LEFT + axes.inner / 2
    parts = [
        f'<svg class="plot" viewBox="0 0 {axes.width} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">',
        _grid(axes),
        *(_line(line, axes) for line in lines if line.points),
        *(_mark(mark, axes) for mark in marks),
        f'<text x="{middle:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(axes.x.label)}</text>',
        "</svg>",
    ]
    return "".join(parts)


def _grid(axes: Axes) -> str:
    parts = []
    for value, text in axes.y.ticks:
        at = axes.down(value)
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}h{axes.inner}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    for value, text in axes.x.ticks:
        at = axes.across(value)
        parts.append(f'<path class="grid faint" d="M{at:.1f} {TOP}v{INNER_H}"/>')
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{TOP + INNER_H + 17}" text-anchor="middle">{escape(text)}</text>'
        )
    parts.append(f'<path class="base" d="M{LEFT} {TOP + INNER_H}h{axes.inner}"/>')
    return "".join(parts)


def _line(line: Line, axes: Axes) -> str:
    places = [(axes.across(at), axes.down(value)) for at, value in line.points]
    path = "M" + "L".join(f"{at:.1f} {value:.1f}" for at, value in (_steps(places) if line.stepped else places))
    area = ""
    if line.filled:
        base = f"L{places[-1][0]:.1f} {TOP + INNER_H}L{places[0][0]:.1f} {TOP + INNER_H}Z"
        area = f'<path class="area tone{line.tone}" d="{path}{base}"/>'
    return f'{area}<path class="line tone{line.tone}" d="{path}"><title>{escape(line.name)}</title></path>'


def _steps(places: Sequence[Point]) -> list[Point]:
    found = [places[0]]
    for (_, before), (at, value) in pairwise(places):
        found += [(at, before), (at, value)]
    return found


def _mark(mark: Mark, axes: Axes) -> str:
    at, height = axes.across(mark.x), axes.down(mark.y)
    right = at > LEFT + 0.6 * axes.inner
    return (
        f'<circle class="dot" cx="{at:.1f}" cy="{height:.1f}" r="3.5"/>'
        f'<text class="note" x="{at + (-9 if right else 9):.1f}" y="{height + (-6 if right else 13):.1f}"'
        f' text-anchor="{"end" if right else "start"}">{escape(mark.text)}</text>'
    )


def linear(most: float, label: str, text: Callable[[float], str], *, ticks: int = 4) -> Axis:
    """Return an axis from 0 to the next round number at or above `most`. `text` makes the labels of ticks."""
    step = _round_step(max(most, 1e-9) / ticks)
    top = step * ceil(max(most, 1e-9) / step - 1e-9)
    marks = tuple((step * at, text(step * at)) for at in range(round(top / step) + 1))
    return Axis(marks, lambda value: value / top, label)


def exact(most: float, label: str, text: Callable[[float], str], *, ticks: int = 6) -> Axis:
    """Return an axis from 0 to `most` itself."""
    most = max(most, 1e-9)
    step = _round_step(most / ticks)
    marks = tuple((step * at, text(step * at)) for at in range(floor(most / step + 1e-9) + 1))
    return Axis(marks, lambda value: min(1.0, value / most), label)


def logarithmic(
    least: float, most: float, label: str, text: Callable[[float], str], length_px: float = NARROW - LEFT - RIGHT
) -> Axis:
    """Return a logarithmic axis with ticks at powers of ten, and between them if there is room for their labels."""
    low, high = log10(max(least, 1e-6)), log10(max(most, least * 1.5, 1.5e-6))
    margin = 0.04 * (high - low)
    low, high = low - margin, high + margin

    def place(value: float) -> float:
        return (log10(max(value, 10**low)) - low) / (high - low)

    def fits(ticks: Sequence[float]) -> bool:
        letters = [len(text(value)) for value in ticks]
        at = [place(value) * length_px / LETTER_PX for value in ticks]
        between = zip(pairwise(at), pairwise(letters), strict=True)
        return len(ticks) <= MOST_TICKS and all(
            right - left >= (one + other) / 2 + LETTERS_APART for (left, right), (one, other) in between
        )

    wide = _rounds((1,), low, high)
    sparse = wide[:: 1 + len(wide) // MOST_TICKS]
    chosen = next((found for factors in FACTORS if fits(found := _rounds(factors, low, high))), sparse)
    return Axis(tuple((value, text(value)) for value in chosen), place, label)


def _rounds(factors: Sequence[float], low: float, high: float) -> list[float]:
    """Return the numbers between 10**low and 10**high that are one of `factors` times a power of ten."""
    found = [factor * 10.0**power for power in range(floor(low), ceil(high) + 1) for factor in factors]
    return [value for value in found if low <= log10(value) <= high]


def shares(label: str) -> Axis:
    """Return an axis from 0 to 100 %."""
    return Axis(tuple((at / 4, f"{25 * at} %") for at in range(5)), lambda value: value, label)


def _round_step(step: float) -> float:
    power = 10.0 ** floor(log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step - 1e-12)
