"""A planner that knows the calls of the next seconds: the fewest loads with which no call waits longer than a bound.

It has all that a real one lacks: models with slots without end, workers that leave at once though they have calls, and
no time for which a model has to stay. It waits with each load for as long as the bound allows, so that the most calls
share it, and lets that model leave which is called last of those that it knows of.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.residency.simulator import Call

STEP_S = 0.25


@dataclass(slots=True)
class Place:
    """Memory for one model."""

    model: str = ""
    ready_at: float = 0.0


@dataclass(slots=True)
class LookAhead:
    """Finds a schedule for calls of models that all take the same memory."""

    calls: Sequence[Call]
    num_places: int
    load_s: float
    """From the moment when a place is given up until the next model is ready there."""
    bound_s: float
    known_s: float = 5.0
    """How far ahead calls are known."""
    num_loads: int = 0
    waits_s: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Count the loads, and how long the calls wait."""
        arrivals: dict[str, list[float]] = {}
        for call in sorted(self.calls, key=lambda call: call.at):
            arrivals.setdefault(call.model, []).append(call.at)
        end_s = max(times[-1] for times in arrivals.values())
        places = [Place() for _ in range(self.num_places)]
        left = dict.fromkeys(arrivals, 0.0)
        now = 0.0
        while True:
            waiting = {
                model: times[first]
                for model, times in arrivals.items()
                if model in left and (first := bisect_left(times, left[model])) < len(times) and times[first] <= now
            }
            if now > end_s and not waiting:
                break
            for model in self._due(waiting, places, now):
                free = [place for place in places if place.ready_at <= now]
                if not free:
                    break
                place = min(free, key=lambda place: (-self._next_s(arrivals, place.model, now), place.ready_at))
                self._load(arrivals, left, place, model, now)
            now += STEP_S
        self.waits_s += [0.0] * (len(self.calls) - len(self.waits_s))

    def _due(self, waiting: dict[str, float], places: Sequence[Place], now: float) -> list[str]:
        """Return the models whose loads can't be put off any longer, given that each takes a place for a while."""
        if any(not place.model for place in places):
            return sorted(waiting, key=waiting.__getitem__)[: sum(not place.model for place in places)]
        order = sorted(waiting, key=waiting.__getitem__)
        latest = [waiting[model] + self.bound_s - self.load_s for model in order]
        for number in range(len(order) - self.num_places - 1, -1, -1):
            latest[number] = min(latest[number], latest[number + self.num_places] - self.load_s)
        return [model for model, moment in zip(order, latest, strict=True) if moment < now + STEP_S]

    def _next_s(self, arrivals: dict[str, list[float]], model: str, now: float) -> float:
        """Return in how many seconds a model is called, as far as that is known."""
        if not model:
            return float("inf")
        times = arrivals[model]
        first = bisect_right(times, now)
        return min(self.known_s, times[first] - now) if first < len(times) else self.known_s

    def _load(
        self, arrivals: dict[str, list[float]], left: dict[str, float], place: Place, model: str, now: float
    ) -> None:
        if place.model:
            left[place.model] = now
        place.model, place.ready_at = model, now + self.load_s
        times = arrivals[model]
        first, last = bisect_left(times, left.pop(model)), bisect_left(times, place.ready_at)
        self.waits_s += [place.ready_at - time for time in times[first:last]]
        self.num_loads += 1
