"""Percentiles by nearest rank: each is a value that was seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

from gateway.bench.document import Spread

POINTS = 100


def spread(values: Iterable[float]) -> Spread:
    """All zero of none."""
    ordered = sorted(values)
    if not ordered:
        return Spread()
    p50, p90, p95, p99 = (_digits(quantile(ordered, share)) for share in (0.5, 0.9, 0.95, 0.99))
    mean = _digits(sum(ordered) / len(ordered))
    return Spread(len(ordered), mean, p50, p90, p95, p99, _digits(ordered[-1]))


def quantile(ordered: Sequence[float], share: float) -> float:
    """The least value that no less than `share` of all do not pass. `ordered` is not empty."""
    return ordered[max(0, min(len(ordered), ceil(share * len(ordered) - 1e-9)) - 1)]


def curve(values: Iterable[float]) -> tuple[float, ...]:
    """Percentiles 0 to 100; empty of none."""
    ordered = sorted(values)
    return tuple(_digits(quantile(ordered, at / POINTS)) for at in range(POINTS + 1)) if ordered else ()


def _digits(value: float) -> float:
    """As many as a clock is worth."""
    return round(value, 6)
