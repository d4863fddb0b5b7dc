"""Calls that come in turn for six models of which two fit, through a whole system, against a planner that looks ahead.

The planner is that of `benchmarks.residency`, and gets the very calls that were made, with the swap time that was
measured before them. It knows the next five seconds, has slots without end, and may take a model's place at any time.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.models.calls import Answer, Caller
from benchmarks.models.files import SIX, SMALL
from benchmarks.models.scenarios import have, told
from benchmarks.models.systems import PLACES, SLOTS
from benchmarks.residency.fleets import alternating
from benchmarks.residency.look_ahead import LookAhead
from benchmarks.residency.simulator import BOUNDS, Call, Simulator, Times, gpu_machine, gpu_need
from benchmarks.table import Row
from workers.residency.decide import decide
from workers.residency.picture import Model
from workers.residency.policy import Residency, resolve

GAP_S = 0.3
TOKENS = 32
NUM_SWAPS = 3
NUM_TURNS = 3
"""Of the caller who is alone."""
MOST_LOADS = 1.2
POLICY = resolve(Residency(), 1)


@dataclass(frozen=True, slots=True)
class Storm:
    """What became of a storm's calls."""

    calls: Sequence[Call]
    """As they came in truth, with how long they computed."""
    answers: Sequence[Answer]
    num_loads: int
    swap_s: float
    """From a call that finds both places taken by idle models until its first token."""

    @property
    def service_s(self) -> float:
        return max((call.service_s for call in self.calls), default=0.0)

    @property
    def bound_s(self) -> float:
        """Return the longest wait that fairness is configured for: patience, then one turn of a loaded model."""
        return BOUNDS.patience_s + POLICY.stay_s(0.0) + self.service_s + self.swap_s


async def run(caller: Caller, num_calls: int, *, gap_s: float = GAP_S, seed: int = 0) -> Storm:
    """Make the calls, each at its time. Raises Unprepared where the system can't swap at all."""
    swap_s = await _swap_s(caller)
    await have(caller)
    before = len(caller.system.loads())
    planned = alternating(num_calls, gap_s, 0.0, len(SIX), seed)
    began = time.monotonic()
    tasks = []
    for call in planned:
        await asyncio.sleep(began + call.at - time.monotonic())
        tasks.append(asyncio.create_task(caller.ask(SIX[int(call.model[1:])], TOKENS)))
    answers = await asyncio.gather(*tasks)
    calls = [
        replace(call, at=answer.asked_at - began, service_s=max(0.0, answer.ended_at - answer.first_at))
        for call, answer in zip(planned, answers, strict=True)
    ]
    return Storm(calls, answers, len(caller.system.loads()) - before, swap_s)


async def _swap_s(caller: Caller) -> float:
    """Return the middle of a few swaps, each of a model that was away."""
    found = []
    for number in range(NUM_SWAPS):
        await have(caller, *(SIX[(3 * number + step) % len(SIX)] for step in range(PLACES)))
        await asyncio.sleep(max(POLICY.stay_s(0.0), BOUNDS.quiet_s) + 1.0)
        answer = await caller.ask(SIX[(3 * number + PLACES) % len(SIX)], max_tokens=1)
        found.append(answer.wait_s)
    return statistics.median(found)


async def one_caller(caller: Caller) -> list[Answer]:
    """Return the answers of a caller who asks one more model in turn than fit, each when the last has answered."""
    await have(caller)
    return [await caller.ask(SMALL[number % (PLACES + 1)]) for number in range(NUM_TURNS * (PLACES + 1))]


def lone_row(system: str, answers: Sequence[Answer]) -> Row:
    """Return the figures of that caller."""
    what = f"{system}: one caller asks {PLACES + 1} models in turn, {PLACES} fit"
    mean_s = sum(answer.wait_s for answer in answers) / len(answers)
    return Row(what, f"{told(answers)}; mean wait {mean_s:.1f} s", "", "", True)


def planned_loads(storm: Storm) -> int:
    """Return the loads of the planner that knows the next five seconds."""
    planner = LookAhead(storm.calls, PLACES, storm.swap_s, BOUNDS.patience_s + storm.swap_s + storm.service_s)
    planner.run()
    return planner.num_loads


def simulated_loads(storm: Storm) -> int:
    """Return the loads that Paddock's decisions come to in simulated time, where all else is exact."""
    models = [Model(f"m{number}", POLICY, gpu_need(10)) for number in range(len(SIX))]
    times = {model.name: Times(load_s=storm.swap_s, unload_s=0.0, slots=SLOTS) for model in models}
    return Simulator(decide, [gpu_machine("host", [24.0])], models, times).run(storm.calls).num_loads


def rows(system: str, storm: Storm, *, has_bars: bool) -> list[Row]:
    """Return a storm's figures, with the issue's bars where it is Paddock's."""
    num = len(storm.answers)
    answered = sum(answer.is_answered for answer in storm.answers)
    gap_s = storm.calls[-1].at / max(1, num - 1)
    what = f"{system}: {num:,} calls over {len(SIX)} models, one each {gap_s:.1f} s, {PLACES} fit"
    waits = sorted(answer.wait_s for answer in storm.answers)
    p99 = waits[min(num - 1, int(0.99 * num))]
    known = planned_loads(storm)
    ratio = storm.num_loads / known
    figure = f"{storm.num_loads} / {known}; mean wait {sum(waits) / num:.1f} s, a swap takes {storm.swap_s:.1f} s"
    simulated = f"; {simulated_loads(storm)} in simulated time" if has_bars else ""
    return [
        Row(
            f"{what}: answered",
            told(storm.answers),
            "",
            f"{num:,}" if has_bars else "",
            answered == num or not has_bars,
        ),
        Row(
            f"{what}: loads, against a planner that knows the next 5 s",
            figure + simulated,
            f"{ratio:.2f}",
            f"<= {MOST_LOADS}" if has_bars else "",
            ratio <= MOST_LOADS or not has_bars,
        ),
        Row(
            f"{what}: p99 of the wait",
            f"{p99:.1f} s",
            "",
            f"<= {storm.bound_s:.1f} s" if has_bars else "",
            p99 <= storm.bound_s or not has_bars,
        ),
    ]
