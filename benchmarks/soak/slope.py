"""How fast a row of measurements grows, and how sure that is: the Theil-Sen estimate with Sen's confidence interval.

The median of the slopes between all pairs of points, which a quarter of wild points does not move. Neighbouring
samples of a process's memory are alike, and an interval that takes them for independent would be too narrow; so they
are first joined into at most `MAX_BLOCKS` medians. Where something else lies between two stretches of time, only pairs
within one of them count. Sources: Theil 1950; Sen, Journal of the American Statistical Association 63 (1968).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

MAX_BLOCKS = 40
MIN_POINTS = 6
"""Fewer say nothing."""
NORMAL_95 = 1.96
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth per hour, in the unit of the values, with the ends of its 95 % interval."""

    per_hour: float
    low: float
    high: float
    span_s: float
    """From the first to the last point, of all stretches together."""

    @property
    def grows(self) -> bool:
        """Whether it is sure that this grows at all."""
        return self.low > 0


Point = tuple[float, float]
"""Seconds, and a value."""


def slope_of(*stretches: Sequence[Point]) -> Slope | None:
    """None where there are fewer than `MIN_POINTS`."""
    num_points = sum(map(len, stretches))
    joined = [blocks(points, math.ceil(MAX_BLOCKS * len(points) / num_points)) for points in stretches if points]
    if sum(map(len, joined)) < MIN_POINTS:
        return None
    slopes = sorted(slope for points in joined for slope in _slopes(points))
    if not slopes:
        return None
    low, high = _interval(slopes, [len(points) for points in joined])
    span_s = sum(points[-1][0] - points[0][0] for points in joined)
    return Slope(median(slopes) * HOUR_S, low * HOUR_S, high * HOUR_S, span_s)


def blocks(points: Sequence[Point], most: int = MAX_BLOCKS) -> list[Point]:
    """The points in order, joined into at most so many medians of equally many neighbours."""
    points = sorted(points)
    size = max(1, math.ceil(len(points) / most))
    parts = [points[at : at + size] for at in range(0, len(points), size)]
    return [(median(time for time, _ in part), median(value for _, value in part)) for part in parts]


def _slopes(points: Sequence[Point]) -> Iterator[float]:
    """Of all pairs."""
    for number, earlier in enumerate(points):
        for later in points[number + 1 :]:
            if later[0] > earlier[0]:
                yield (later[1] - earlier[1]) / (later[0] - earlier[0])


def _interval(slopes: Sequence[float], sizes: Sequence[int]) -> tuple[float, float]:
    """By the variance of Kendall's S where nothing grows, which adds up over stretches."""
    variance = sum(size * (size - 1) * (2 * size + 5) / 18 for size in sizes)
    spread = NORMAL_95 * math.sqrt(variance)
    first = max(0, math.floor((len(slopes) - spread) / 2))
    last = min(len(slopes) - 1, math.ceil((len(slopes) + spread) / 2))
    return slopes[first], slopes[last]
