"""Residency in simulated time: loads against a planner that knows what comes, waits, and what a decision costs.

    python -m benchmarks residency

Six models of 10 GiB share a GPU of 24 GiB; loading takes 4 s, unloading 0.5 s, a worker has 4 slots.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.residency.fleets import NOW, alternating, full_fleet
from benchmarks.residency.look_ahead import LookAhead
from benchmarks.residency.simulator import BOUNDS, Call, Figures, Simulator, Times, gpu_machine, gpu_need
from benchmarks.residency.whole_path import WholePath
from benchmarks.table import Row
from workers.residency.decide import decide
from workers.residency.picture import Model, Picture
from workers.residency.policy import Residency, resolve

NUM_CALLS, NUM_MODELS, NUM_PLACES = 1_000, 6, 2
TIMES = Times(load_s=4.0, unload_s=0.5, slots=4)
SERVICE_S = 2.0
POLICY = resolve(Residency(), 1)
TURN_S = POLICY.stay_s(0.0) + SERVICE_S + TIMES.unload_s + TIMES.load_s
BOUND_S = BOUNDS.patience_s + TURN_S
"""The longest wait that fairness is configured for: patience, then one turn of a model that is loaded."""
MOST_LOADS, MOST_MS = 1.2, 50.0


def simulated(calls: Sequence[Call]) -> Figures:
    """Return how these calls fare where residency is decided as in a fleet."""
    models = [Model(f"m{number}", POLICY, gpu_need(10)) for number in range(NUM_MODELS)]
    times = {model.name: TIMES for model in models}
    return Simulator(decide, [gpu_machine("host", [24.0])], models, times).run(calls)


def looked_ahead(calls: Sequence[Call]) -> LookAhead:
    """Return how they fare where the next 5 s are known. It is held to the patience alone, not to the whole bound."""
    load_s = TIMES.unload_s + TIMES.load_s
    found = LookAhead(calls, NUM_PLACES, load_s, BOUNDS.patience_s + load_s + SERVICE_S)
    found.run()
    return found


def measure(size: int) -> list[Row]:
    """`size`: how often each decision is timed."""
    rows: list[Row] = []
    for gap_s, seed, has_bar in ((0.5, 0, True), (0.5, 1, True), (1.0, 0, True), (1.0, 1, True), (4.0, 1, False)):
        rows += _storm(gap_s, seed, has_bar)
    for what, picture in fleets().items():
        rows.append(_decision(what, picture, size))
    for what, picture in fleets().items():
        if len(picture.machines) > 1:
            rows.append(_whole_path(what, picture, size))
    return rows


def _storm(gap_s: float, seed: int, has_bar: bool) -> list[Row]:
    calls = alternating(NUM_CALLS, gap_s, SERVICE_S, NUM_MODELS, seed)
    ours, known = simulated(calls), looked_ahead(calls)
    order = "at random" if seed else "in turn"
    what = f"{NUM_CALLS:,} calls over {NUM_MODELS} models {order}, one each {gap_s:g} s, {NUM_PLACES} fit"
    waits, known_waits = ours.all_waits_s(), known.waits_s
    ratio = ours.num_loads / known.num_loads
    means = f"mean wait {sum(waits) / len(waits):.1f} s, theirs {sum(known_waits) / len(known_waits):.1f} s"
    p99 = ours.quantile_s(0.99)
    return [
        Row(f"{what}: answered", f"{len(waits):,}", "", f"{NUM_CALLS:,}", len(waits) == NUM_CALLS),
        Row(
            f"{what}: loads, against a planner that knows the next 5 s",
            f"{ours.num_loads} / {known.num_loads}; {means}",
            f"{ratio:.2f}",
            f"<= {MOST_LOADS}" if has_bar else "",
            ratio <= MOST_LOADS or not has_bar,
        ),
        Row(f"{what}: p99 of the wait", f"{p99:.1f} s", "", f"<= {BOUND_S:.1f} s", p99 <= BOUND_S),
    ]


def fleets() -> dict[str, Picture]:
    """Return the fleets whose decisions are timed."""
    return {
        "50 machines of 8 GPUs, 200 models, 20 wait, all idle": full_fleet(50, 8, 200, 20, part_busy=0),
        "50 machines of 8 GPUs, 200 models, 20 wait, half busy": full_fleet(50, 8, 200, 20, part_busy=0.5),
        "50 machines of 8 GPUs, 200 models, 100 wait, half busy": full_fleet(50, 8, 200, 100, part_busy=0.5),
        "50 machines of 8 GPUs, 200 models, 100 wait, all busy": full_fleet(50, 8, 200, 100, part_busy=1),
        "1 machine of 8 GPUs, 30 models, 10 wait, half busy": full_fleet(1, 8, 30, 10, part_busy=0.5),
    }


def _decision(what: str, picture: Picture, rounds: int) -> Row:
    """Return the middle of the times that a decision took."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        decide(picture, NOW)
        times.append(time.perf_counter() - began)
    middle_ms = sorted(times)[len(times) // 2] * 1_000
    workers = f"{len(picture.workers):,} workers"
    return Row(
        f"{what}, {workers}: one decision", f"{middle_ms:.1f} ms", "", f"<= {MOST_MS:.0f} ms", middle_ms <= MOST_MS
    )


def _whole_path(what: str, picture: Picture, rounds: int) -> Row:
    """Return the middle of the times that a decision took with all that the planner does for it, but for Redis."""
    times = sorted(WholePath(picture).times_s(rounds))
    middle_ms = times[len(times) // 2] * 1_000
    return Row(
        f"{what}: heard, merged, decided and ordered",
        f"{middle_ms:.1f} ms",
        "",
        f"<= {MOST_MS:.0f} ms",
        middle_ms <= MOST_MS,
    )
