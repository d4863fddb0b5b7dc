"""Computes percentiles by nearest rank: each is a value that was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

from gateway.bench.document import Spread

POINTS = 100


def spread(values: Iterable[float]) -> Spread:
    """Return the distribution of values; all zero where there are none."""
    ordered = sorted(values)
    if not ordered:
        return Spread()
    p50, p90, p95, p99 = (_digits(quantile(ordered, share)) for share in (0.5, 0.9, 0.95, 0.99))
    mean = _digits(sum(ordered) / len(ordered))
    return Spread(len(ordered), mean, p50, p90, p95, p99, _digits(ordered[-1]))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the least value that at least `share` of all values do not exceed. `ordered` is not empty."""
    return ordered[max(0, min(len(ordered), ceil(share * len(ordered) - 1e-9)) - 1)]


def curve(values: Iterable[float]) -> tuple[float, ...]:
    """Return percentiles 0 to 100; empty where there are no values."""
    ordered = sorted(values)
    return tuple(_digits(quantile(ordered, at / POINTS)) for at in range(POINTS + 1)) if ordered else ()


def _digits(value: float) -> float:
    """Round a time to microseconds."""
    return round(value, 6)
