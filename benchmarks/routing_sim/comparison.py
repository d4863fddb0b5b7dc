"""One fleet, one trace, every policy: a few rounds of each, and what they come to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from statistics import fmean

import redis.asyncio

from benchmarks.routing_sim.floor import Floor, Outcome, simulate
from benchmarks.routing_sim.machine import Speed
from benchmarks.routing_sim.paddock import paddock
from benchmarks.routing_sim.policies import LISTED
from benchmarks.routing_sim.reports import MODEL
from benchmarks.routing_sim.traces import Arrival, Trace, overlaid
from gateway.store.integrity import check_integrity

OURS = "ours"
BLOCKS = 2_000
"""Of one worker's cache."""
TRACED = 8
"""Workers that one copy of a trace is for."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is simulated."""

    workers: int
    slots: int = 1
    """1: prompts alone, answers take nothing."""
    load: float = 0.9
    """Prompt tokens that come, none of them cached, over those that all workers could compute."""
    step_s: float = 0.0
    sequence_s: float = 0.0
    end_s: float = inf
    """Calls that come later are left out."""

    def floor(self, trace: Trace) -> Floor:
        speed = Speed(trace.tokens_per_s / self.load / TRACED, self.step_s, self.sequence_s)
        return Floor(self.workers, self.slots, speed, BLOCKS)

    def arrivals(self, trace: Trace) -> Iterable[Arrival]:
        return overlaid(trace, self.workers // TRACED, self.end_s)


def with_answers(workers: int, end_s: float = inf) -> Fleet:
    """8 slots; a step of decoding takes 8 ms and a quarter for each answer, which prompts wait for."""
    return Fleet(workers, slots=8, load=0.7, step_s=0.008, sequence_s=0.00025, end_s=end_s)


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over the rounds."""

    ttft_s: float
    p99_s: float
    wait_s: float
    cached: float
    busiest: float

    def __str__(self) -> str:
        return f"{self.ttft_s:.2f} s, p99 {self.p99_s:.1f} s; cached {self.cached:.2f}; busiest {self.busiest:.2f}"


def figures(outcomes: Iterable[Outcome]) -> Figures:
    found = [(one.ttft_s, one.quantile_s(0.99), one.wait_s, one.cached, one.busiest) for one in outcomes]
    return Figures(*(fmean(column) for column in zip(*found, strict=True)))


async def compared(
    client: redis.asyncio.Redis,
    trace: Trace,
    fleet: Fleet,
    rounds: int = 1,
    policies: Iterable[str] = (*LISTED, OURS),
    gateways: int = 1,
) -> dict[str, Figures]:
    """Each round begins at another place of the trace, and breaks ties in another way."""
    traces = [trace.turned(number / rounds) for number in range(rounds)]
    found = {}
    for name in policies:
        outcomes = []
        for seed, turned in enumerate(traces):
            floor = fleet.floor(turned)
            if name == OURS:
                outcomes.append(await ours(client, floor, fleet.arrivals(turned), gateways=gateways))
            else:
                outcomes.append(await simulate(fleet.arrivals(turned), floor, LISTED[name](floor, seed)))
        found[name] = figures(outcomes)
    return found


async def ours(
    client: redis.asyncio.Redis,
    floor: Floor,
    arrivals: Iterable[Arrival],
    *,
    end_s: float = inf,
    gateways: int = 1,
    weights: Mapping[str, float] | None = None,
) -> Outcome:
    """Raises IntegrityError where the line in Redis contradicts itself afterwards."""
    async with paddock(floor, client, gateways=gateways, weights=weights) as policy:
        outcome = await simulate(arrivals, floor, policy, end_s)
    await check_integrity(client, MODEL)
    return outcome
