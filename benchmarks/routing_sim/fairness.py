"""Two teams that want more than there is: whether each gets its share, and whose deadlines are missed."""

from __future__ import annotations

from collections.abc import Mapping

import redis.asyncio

from benchmarks.routing_sim.comparison import ours
from benchmarks.routing_sim.floor import Floor, Outcome, simulate
from benchmarks.routing_sim.machine import Speed
from benchmarks.routing_sim.made_up import team, together
from benchmarks.routing_sim.policies import OneLine
from benchmarks.routing_sim.traces import Trace
from benchmarks.table import Row

WORKERS, SLOTS = 8, 4
SPEED = Speed(prefill=4_000.0, step_s=0.02, sequence_s=0.0005)
CALLS_PER_S = 4.6
"""About as many as these workers finish."""
WEIGHTS = {"one": 1.0, "three": 3.0}
SETTLED_S = 60.0
SLO_S = 10.0
WITHIN = 0.05


def floor() -> Floor:
    return Floor(WORKERS, SLOTS, SPEED, 2_000)


async def measure(client: redis.asyncio.Redis, end_s: float) -> list[Row]:
    """`end_s`: simulated seconds."""
    return [await _shares(client, end_s), *await _deadlines(client, end_s)]


async def _shares(client: redis.asyncio.Redis, end_s: float) -> Row:
    trace = together(team("one", CALLS_PER_S, end_s), team("three", CALLS_PER_S, end_s))
    outcome = await ours(client, floor(), trace.calls, end_s=end_s, weights=WEIGHTS)
    took = served(outcome, SETTLED_S, end_s)
    part = took["three"] / sum(took.values())
    fair = WEIGHTS["three"] / sum(WEIGHTS.values())
    off = max(abs(part / fair - 1), abs((1 - part) / (1 - fair) - 1))
    figure = f"{1 - part:.3f} and {part:.3f} of the tokens"
    what = f"two teams with weights 1 and 3 ask for twice what there is, {end_s / 60:.0f} min"
    return Row(what, figure, f"off by {off:.1%}", f"<= {WITHIN:.0%}", off <= WITHIN)


def served(outcome: Outcome, start_s: float, end_s: float) -> Mapping[str, int]:
    """Team -> tokens of its calls that ended between the two."""
    took = dict.fromkeys((job.arrival.team for job in outcome.jobs), 0)
    for job in outcome.jobs:
        if start_s <= job.done_at <= end_s:
            took[job.arrival.team] += job.took
    return took


async def _deadlines(client: redis.asyncio.Redis, end_s: float) -> list[Row]:
    """Team `one` asks for half of its quarter, team `three` for more than all there is."""
    calls = together(
        team("one", CALLS_PER_S / 8, end_s, slo_s=SLO_S), team("three", CALLS_PER_S * 1.1, end_s, slo_s=SLO_S)
    ).calls
    first_come, fair = floor(), floor()
    trace = Trace("teams", calls)
    before = await simulate(trace.calls, first_come, OneLine(first_come, 1), end_s)
    after = await ours(client, fair, trace.calls, end_s=end_s, weights=WEIGHTS)
    missed = {name: (before.missed(name, end_s), after.missed(name, end_s)) for name in WEIGHTS}
    total = [sum(column) for column in zip(*missed.values(), strict=True)]
    what = f"first tokens later than {SLO_S:.0f} s, {len(calls)} calls, a team within its share and one far beyond:"
    return [
        Row(f"{what} all, ours against one line", f"{total[1]} against {total[0]}", "", "<=", total[1] <= total[0]),
        Row(
            f"{what} the team within its share",
            f"{missed['one'][1]} against {missed['one'][0]}",
            "",
            "0",
            missed["one"][1] == 0,
        ),
    ]
