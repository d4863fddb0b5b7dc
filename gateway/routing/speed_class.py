"""Workers that are about equally fast, sorted by when they are ready."""

from __future__ import annotations

from bisect import bisect_left, insort_right
from dataclasses import dataclass
from math import floor, log
from operator import attrgetter

from gateway.routing.standing import Standing

SPEED_STEP = 1.25
"""Factor within which the prefill speeds of one class lie; its workers are gone through by readiness alone."""

_ready_at = attrgetter("ready_at")
_prefill_ms = attrgetter("prefill_ms")


@dataclass(frozen=True, slots=True)
class SpeedClass:
    """The workers of one class at one moment."""

    prefill_ms: float
    """Milliseconds per prompt token of the fastest worker."""
    by_readiness: tuple[Standing, ...]


class SpeedClasses:
    """All speed classes, kept sorted as workers come and go; a change costs the logarithm of their number."""

    def __init__(self) -> None:
        self._sorted: dict[int, list[Standing]] = {}
        self._drawn: dict[int, SpeedClass] = {}
        """Speed -> class as last drawn, of classes that have not changed since."""

    def add(self, there: Standing) -> None:
        speed = _speed(there)
        insort_right(self._sorted.setdefault(speed, []), there, key=_ready_at)
        self._drawn.pop(speed, None)

    def remove(self, there: Standing) -> None:
        """Remove a worker. Raises ValueError for one that is not in its class."""
        speed = _speed(there)
        members = self._sorted.get(speed, [])
        del members[members.index(there, bisect_left(members, there.ready_at, key=_ready_at))]
        self._drawn.pop(speed, None)
        if not members:
            del self._sorted[speed]

    def draw(self) -> tuple[SpeedClass, ...]:
        """Return the classes as they are now, the fastest first."""
        for speed, members in self._sorted.items():
            if speed not in self._drawn:
                self._drawn[speed] = SpeedClass(min(map(_prefill_ms, members)), tuple(members))
        return tuple(self._drawn[speed] for speed in sorted(self._sorted))


def _speed(there: Standing) -> int:
    return floor(log(there.prefill_ms, SPEED_STEP))
