"""How fast a row of measurements grows, and how sure that is: the Theil-Sen estimate with Sen's confidence interval.

The median of the slopes between all pairs of points, which a quarter of wild points does not move. Neighbouring
samples of a process's memory are alike, and an interval that takes them for independent would be too narrow; so they
are first joined into at most `MAX_BLOCKS` medians. Sources: Theil 1950; Sen, Journal of the American Statistical
Association 63 (1968).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    """From the first to the last point."""

    @property
    def grows(self) -> bool:
        """Whether it is sure that this grows at all."""
        return self.low > 0


def slope_of(times_s: Sequence[float], values: Sequence[float]) -> Slope | None:
    """None where there are fewer than `MIN_POINTS`."""
    points = blocks(times_s, values)
    if len(points) < MIN_POINTS:
        return None
    slopes = sorted(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for number, earlier in enumerate(points)
        for later in points[number + 1 :]
        if later[0] > earlier[0]
    )
    low, high = _interval(slopes, len(points))
    estimate = median(slopes)
    return Slope(estimate * HOUR_S, low * HOUR_S, high * HOUR_S, points[-1][0] - points[0][0])


def blocks(times_s: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """The points in order, joined into at most `MAX_BLOCKS` medians of equally many neighbours."""
    points = sorted(zip(times_s, values, strict=True))
    size = max(1, math.ceil(len(points) / MAX_BLOCKS))
    parts = [points[at : at + size] for at in range(0, len(points), size)]
    return [(median(time for time, _ in part), median(value for _, value in part)) for part in parts]


def _interval(slopes: Sequence[float], num_points: int) -> tuple[float, float]:
    """By the variance of Kendall's S where nothing grows."""
    spread = NORMAL_95 * math.sqrt(num_points * (num_points - 1) * (2 * num_points + 5) / 18)
    first = max(0, math.floor((len(slopes) - spread) / 2))
    last = min(len(slopes) - 1, math.ceil((len(slopes) + spread) / 2))
    return slopes[first], slopes[last]
