"""The events of one simulated fleet, in order of time, and what came of its calls."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.routing_sim.machine import Blocks, Job, Machine, Speed
from benchmarks.routing_sim.traces import Arrival


class Policy(Protocol):
    """Decides where calls go: `Floor.start` puts one on a machine."""

    @property
    def next_at(self) -> float:
        """When `tick` is to be called next."""

    async def came(self, job: Job, now: float) -> None: ...

    async def ended(self, job: Job, now: float) -> None:
        """It left its machine."""

    async def tick(self, now: float) -> None: ...


class Floor:
    """All machines, and the heap of what happens next on them."""

    def __init__(self, machines: int, slots: int, speed: Speed, blocks: int) -> None:
        self.machines = [Machine(number, slots, speed, Blocks(blocks)) for number in range(machines)]
        self.speed = speed
        self.slots = slots
        self.calls = np.zeros(machines, dtype=np.int64)
        """Of each machine, those without a slot included."""
        self._backlog, self._as_of, self._rate = (np.zeros(machines) for _ in range(3))
        self._next: list[tuple[float, int]] = []
        self._ended: list[Job] = []
        self.watch: Callable[[Machine, float], None] = lambda machine, now: None
        """Told of every machine on which something has changed."""

    def work_s(self, now: float) -> NDArray[np.float64]:
        """Of each machine: seconds until the prompts that are there are computed, with nothing beside them."""
        left = self._backlog - (now - self._as_of) * self._rate
        return np.maximum(left, 0.0) / self.speed.prefill

    def start(self, job: Job, machine: int, now: float) -> None:
        chosen = self.machines[machine]
        self._ended += chosen.accept(job, now)
        self._changed(chosen, now)

    def next_at(self) -> float:
        while self._next and self.machines[self._next[0][1]].next_at != self._next[0][0]:
            heapq.heappop(self._next)  # something came in between, and it was planned anew
        return self._next[0][0] if self._next else inf

    def advance(self) -> None:
        """Only when `next_at` is not infinite."""
        now, number = heapq.heappop(self._next)
        machine = self.machines[number]
        self._ended += machine.advance(now)
        self._changed(machine, now)

    def take_ended(self) -> list[Job]:
        ended, self._ended = self._ended, []
        return ended

    def _changed(self, machine: Machine, now: float) -> None:
        if machine.next_at < inf:
            heapq.heappush(self._next, (machine.next_at, machine.number))
        number = machine.number
        self.calls[number] = machine.calls
        self._backlog[number], self._as_of[number], self._rate[number] = machine.backlog, machine.now, machine.rates[0]
        self.watch(machine, now)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one policy on one trace."""

    jobs: list[Job]
    """Every call, in the order in which they came; where the simulation was ended before, some have no answer."""
    work: list[float]
    """Prompt tokens that each machine computed."""

    @property
    def begun(self) -> list[Job]:
        """Those whose answers have begun."""
        return [job for job in self.jobs if job.first_at >= 0]

    @property
    def ttft_s(self) -> float:
        return fmean(job.ttft_s for job in self.begun)

    @property
    def wait_s(self) -> float:
        """Until the prompt's turn came."""
        return fmean(job.began_at - job.arrival.at_s for job in self.begun)

    @property
    def cached(self) -> float:
        """Part of all prompt tokens."""
        begun = self.begun
        return sum(job.cached for job in begun) / sum(job.arrival.tokens for job in begun)

    @property
    def busiest(self) -> float:
        """Work of the busiest machine over the mean."""
        return max(self.work) / fmean(self.work)

    def quantile_s(self, part: float) -> float:
        """Of the times to the first token."""
        times = sorted(job.ttft_s for job in self.begun)
        return times[min(len(times) - 1, int(part * len(times)))]

    def missed(self, team: str, until_s: float) -> int:
        """Calls of a team whose first token was wanted by then, and came later or never."""
        due = (job for job in self.jobs if job.arrival.team == team and 0 < job.due_at <= until_s)
        return sum(not 0 <= job.first_at <= job.due_at for job in due)


async def simulate(arrivals: Iterable[Arrival], floor: Floor, policy: Policy, end_s: float = inf) -> Outcome:
    """Until every call has its answer, or until `end_s`."""
    jobs: list[Job] = []
    coming = iter(arrivals)
    arrival = next(coming, None)
    served = 0
    while arrival is not None or served < len(jobs):
        now = min(arrival.at_s if arrival else inf, floor.next_at(), policy.next_at)
        if now > end_s:
            break
        if now == policy.next_at:
            await policy.tick(now)
        elif arrival is not None and now == arrival.at_s:
            jobs.append(Job(len(jobs), arrival))
            await policy.came(jobs[-1], now)
            arrival = next(coming, None)
        else:
            floor.advance()
        while ended := floor.take_ended():
            served += len(ended)
            for job in ended:
                await policy.ended(job, now)
    return Outcome(jobs, [machine.worked for machine in floor.machines])
