"""Lines, areas and heat as SVG."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from preview.source import Line
from preview.words import AFTER, words

COLOURS = (
    *("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#37872d", "#e0b400", "#fade2a"),
    *("#705da0", "#447ebc", "#c15c17", "#890f02", "#0a437c", "#6d1f62", "#584477", "#b7dbab", "#f4d598", "#70dbed"),
)
STEP_COLOURS = {"green": "#73bf69", "orange": "#ff9830", "red": "#f2495c"}
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 62, 10, 8, 20
NUM_TICKS = 4
TIME_LABEL_PX = 90


@dataclass(frozen=True, slots=True)
class Frame:
    """A drawing of `width` x `height` pixels over the time from `start` to `end`, with values from 0 to `top`."""

    width: int
    height: int
    start: float
    end: float
    top: float
    unit: str

    def x(self, at: float) -> float:
        inner = self.width - MARGIN_LEFT - MARGIN_RIGHT
        return MARGIN_LEFT + inner * (at - self.start) / max(self.end - self.start, 1.0)

    def y(self, value: float) -> float:
        inner = self.height - MARGIN_TOP - MARGIN_BOTTOM
        return MARGIN_TOP + inner * (1 - min(value, self.top) / self.top)


def rounded_up(value: float, unit: str) -> float:
    """The next number that an axis can end at."""
    if value <= 0:
        return 1.0
    if unit == "bytes":
        size = 1024.0 ** int(math.log(max(value, 1.0), 1024))
        return size * rounded_up(value / size, "")
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        factor * power for factor in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 5, 6, 8, 10) if factor * power >= value * 0.999
    )


def line_plot(lines: Sequence[Line], frame: Frame, stacked: bool, steps: Sequence[tuple[float, str]]) -> str:
    """`steps`: where dashed lines lie, and their colours."""
    parts = list(_grid(frame))
    for value, colour in steps:
        if 0 < value <= frame.top:
            y = frame.y(value)
            parts.append(
                f'<line x1="{MARGIN_LEFT}" x2="{frame.width - MARGIN_RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
                f'stroke="{STEP_COLOURS[colour]}" stroke-dasharray="6 4" opacity=".7"/>'
            )
    drawn = list(_stacked(lines) if stacked else ((line.points, ()) for line in lines))
    for number, (upper, lower) in reversed(list(enumerate(drawn))):
        parts.append(_area(upper, lower, frame, COLOURS[number % len(COLOURS)], 0.35 if stacked else 0.04))
    return _svg(parts, frame)


Points = Sequence[tuple[float, float]]


def _stacked(lines: Sequence[Line]) -> Iterator[tuple[Points, Points]]:
    """Each line's upper and lower edge."""
    below: dict[float, float] = {}
    for line in lines:
        lower = [(at, below.get(at, 0.0)) for at, _ in line.points]
        upper = [(at, below.get(at, 0.0) + value) for at, value in line.points]
        below |= dict(upper)
        yield upper, lower


def stacked_top(lines: Sequence[Line]) -> float:
    return max((value for upper, _ in _stacked(lines) for _, value in upper), default=0.0)


def _area(upper: Points, lower: Points, frame: Frame, colour: str, opacity: float) -> str:
    if not upper:
        return ""
    edge = " ".join(f"{frame.x(at):.1f},{frame.y(value):.1f}" for at, value in upper)
    ground = lower or [(at, 0.0) for at, _ in upper]
    back = " ".join(f"{frame.x(at):.1f},{frame.y(value):.1f}" for at, value in reversed(ground))
    return (
        f'<polygon points="{edge} {back}" fill="{colour}" opacity="{opacity}"/>'
        f'<polyline points="{edge}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    )


def heat_plot(lines: Sequence[Line], frame: Frame, step_s: float) -> str:
    """`lines`: one per bucket, counting all below its bound `le`."""
    buckets = sorted(lines, key=lambda line: float(line.labels["le"]))
    rows: list[tuple[str, dict[float, float]]] = []
    below: dict[float, float] = {}
    for bucket in buckets:
        counts = dict(bucket.points)
        rows.append((bucket.labels["le"], {at: max(0.0, count - below.get(at, 0.0)) for at, count in counts.items()}))
        below = counts
    used = [number for number, (_, cells) in enumerate(rows) if any(count > 0.05 for count in cells.values())]
    rows = rows[used[0] : used[-1] + 1] if used else []
    most = max((count for _, cells in rows for count in cells.values()), default=1.0)
    tall = (frame.height - MARGIN_TOP - MARGIN_BOTTOM) / max(len(rows), 1)
    wide = frame.x(frame.start + step_s) - frame.x(frame.start)
    parts = list(_times(frame))
    for number, (bound, cells) in enumerate(reversed(rows)):
        y = MARGIN_TOP + number * tall
        label = "more" if bound == "+Inf" else words(float(bound), frame.unit)
        parts.append(f'<text x="{MARGIN_LEFT - 6}" y="{y + tall / 2 + 4:.1f}" text-anchor="end">{label}</text>')
        for at, count in cells.items():
            if count > 0.05:
                colour = _hot(math.sqrt(count / most))
                parts.append(
                    f'<rect x="{frame.x(at - step_s):.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall - 1:.1f}" '
                    f'fill="{colour}"/>'
                )
    return _svg(parts, frame)


def _hot(share: float) -> str:
    """From dark brown over orange to nearly white."""
    stops = ((59, 32, 8), (214, 92, 6), (255, 178, 92), (255, 243, 223))
    place = min(max(share, 0.0), 0.999) * (len(stops) - 1)
    low, high, part = stops[int(place)], stops[int(place) + 1], place % 1
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(low, high, strict=True))


def spark(points: Points, colour: str, width: int, height: int) -> str:
    """The small line below a figure."""
    if len(points) < 2:
        return ""
    top = max(value for _, value in points) or 1.0
    start, end = points[0][0], points[-1][0]
    placed = [
        (width * (at - start) / max(end - start, 1.0), height - (height - 2) * value / top) for at, value in points
    ]
    edge = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    return (
        f'<svg class="spark" viewBox="0 0 {width} {height}" preserveAspectRatio="none">'
        f'<polygon points="0,{height} {edge} {width},{height}" fill="{colour}" opacity=".18"/>'
        f'<polyline points="{edge}" fill="none" stroke="{colour}" stroke-width="1.2"/></svg>'
    )


def _grid(frame: Frame) -> Iterator[str]:
    for number in range(NUM_TICKS + 1):
        value = frame.top * number / NUM_TICKS
        y = frame.y(value)
        yield f'<line x1="{MARGIN_LEFT}" x2="{frame.width - MARGIN_RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        told = escape(words(value, "short" if frame.unit in AFTER else frame.unit))
        yield f'<text x="{MARGIN_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{told}</text>'
    yield from _times(frame)


def _times(frame: Frame) -> Iterator[str]:
    span = frame.end - frame.start
    most = frame.width / TIME_LABEL_PX
    every = next(size for size in (30, 60, 120, 300, 900, 3600, 14_400, 86_400, math.inf) if span / size <= most)
    at = math.ceil(frame.start / every) * every
    while at <= frame.end:
        told = time.strftime("%H:%M:%S" if every < 60 else "%H:%M", time.gmtime(at))
        x = frame.x(at)
        yield f'<text x="{x:.1f}" y="{frame.height - 4}" text-anchor="middle">{told}</text>'
        at += every


def _svg(parts: Sequence[str], frame: Frame) -> str:
    return f'<svg class="plot" viewBox="0 0 {frame.width} {frame.height}">{"".join(parts)}</svg>'
