"""The planner that residency is measured against is close to the best schedule that there is."""

from __future__ import annotations

import random
from functools import cache

from benchmarks.residency.look_ahead import LookAhead
from benchmarks.residency.simulator import Call

LOAD_S, BOUND_S = 2, 8


def fewest_loads(calls: list[Call], num_places: int) -> int:
    """Return the fewest loads with which no call waits longer than the bound, by trying all schedules of whole
    seconds."""
    arrivals = {model: sorted(call.at for call in calls if call.model == model) for model in {c.model for c in calls}}
    end = max(call.at for call in calls) + BOUND_S

    @cache
    def best(now: int, places: tuple[tuple[str, int], ...], left: tuple[tuple[str, int], ...]) -> float:
        waiting = {
            model: oldest
            for model, since in left
            if (oldest := next((at for at in arrivals[model] if since <= at <= now), None)) is not None
        }
        if any(now + LOAD_S - oldest > BOUND_S for oldest in waiting.values()):
            return float("inf")
        if now > end and not waiting:
            return 0
        found = best(now + 1, places, left)
        for number, (model, ready_at) in enumerate(places):
            for wanted in waiting if ready_at <= now else ():
                others = (*places[:number], *places[number + 1 :], (wanted, now + LOAD_S))
                gone = [(name, since) for name, since in left if name != wanted] + ([(model, now)] if model else [])
                found = min(found, 1 + best(now, tuple(sorted(others)), tuple(sorted(gone))))
        return found

    return int(best(0, (("", 0),) * num_places, tuple((model, 0) for model in sorted(arrivals))))


def test_its_loads_are_close_to_the_fewest() -> None:
    chance = random.Random(3)
    loads = fewest = 0
    for _ in range(6):
        calls = [Call(float(second), chance.choice("abcd"), 1.0) for second in range(0, 24, 2)]
        planner = LookAhead(calls, 2, LOAD_S, BOUND_S)
        planner.run()
        loads, fewest = loads + planner.num_loads, fewest + fewest_loads(calls, 2)
        assert max(planner.waits_s) <= BOUND_S
    assert fewest <= loads <= 1.25 * fewest, "which knows all calls, not those of the next seconds"
