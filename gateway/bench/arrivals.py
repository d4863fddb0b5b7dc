"""Generates the times at which calls are due: seconds after the beginning, without end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, repeat
from random import Random


def arrivals(rate: float, variation: float, chance: Random) -> Iterator[float]:
    """Return times of `rate` calls a second. `variation` is the coefficient of variation of the gaps between calls.

    0: even; 1: Poisson, as of many independent people; above: bursts (gamma-distributed gaps).
    """
    return accumulate(_gaps(rate, variation, chance))


def _gaps(rate: float, variation: float, chance: Random) -> Iterable[float]:
    if variation == 0:
        return repeat(1 / rate)
    shape = variation**-2
    return (chance.gammavariate(shape, 1 / (rate * shape)) for _ in repeat(None))
