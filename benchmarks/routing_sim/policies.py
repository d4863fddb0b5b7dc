"""The ways of placing calls that ours is held against. All of them see the true state of every machine at once."""

from __future__ import annotations

import random
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Callable
from hashlib import blake2b
from math import inf
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.routing_sim.floor import Floor, Policy
from benchmarks.routing_sim.machine import Job

BOUND = 1.25
POINTS = 100
"""Of each machine on the ring."""
_NO_SLOT_S = 1e6
_EQUAL_S = 1e-6


class AtOnce:
    """Each call goes to a machine as it comes and waits there, first in, first out."""

    next_at: ClassVar[float] = inf

    def __init__(self, floor: Floor, seed: int) -> None:
        self.floor = floor
        self.machines = floor.machines
        self.chance = random.Random(seed)

    def choose(self, job: Job, now: float) -> int:
        raise NotImplementedError

    async def came(self, job: Job, now: float) -> None:
        self.floor.start(job, self.choose(job, now), now)

    async def ended(self, job: Job, now: float) -> None:
        pass

    async def tick(self, now: float) -> None:
        pass

    def least(self, costs: NDArray[np.float64]) -> int:
        """Of the cheapest machines any one."""
        best = np.flatnonzero(costs <= costs.min() + _EQUAL_S)
        return int(best[self.chance.randrange(len(best))])

    def loads(self, now: float) -> NDArray[np.float64]:
        """Work to be done; where several slots share a machine, those without a free one come last."""
        work = self.floor.work_s(now)
        if self.floor.slots == 1:
            return work
        return work + _NO_SLOT_S * np.maximum(0, self.floor.calls + 1 - self.floor.slots)


class Random(AtOnce):
    def choose(self, job: Job, now: float) -> int:
        return self.chance.randrange(len(self.machines))


class RoundRobin(AtOnce):
    def choose(self, job: Job, now: float) -> int:
        return job.number % len(self.machines)


class LeastBusy(AtOnce):
    def choose(self, job: Job, now: float) -> int:
        return self.least(self.loads(now))


class Cached(AtOnce):
    """Knows which machines have the first block of a prompt: no other can have any of it."""

    def __init__(self, floor: Floor, seed: int) -> None:
        super().__init__(floor, seed)
        self._having: dict[int, set[int]] = defaultdict(set)

    async def came(self, job: Job, now: float) -> None:
        await super().came(job, now)
        blocks = self.machines[job.machine].blocks
        for block in blocks.tell(job.arrival.blocks):
            self._having[block].add(job.machine)
        for block in blocks.take_lost():
            self._having[block].discard(job.machine)
            if not self._having[block]:
                del self._having[block]

    def cached(self, job: Job) -> dict[int, int]:
        """Machine -> tokens of the prompt that it has, of those that have any."""
        first = job.arrival.blocks[:1]
        numbers = self._having.get(first[0], ()) if first else ()
        return {number: self.machines[number].blocks.cached(job.arrival) for number in numbers}


class PureAffinity(Cached):
    """Most of the prompt cached; the least busy of equals."""

    def choose(self, job: Job, now: float) -> int:
        costs, cached = self.loads(now), self.cached(job)
        if not cached:
            return self.least(costs)
        most = max(cached.values())
        return min((costs[number], number) for number, tokens in cached.items() if tokens == most)[1]


class BoundedHashing(AtOnce):
    """Consistent hashing of the prompt's first block; machines with more than 1.25 times the mean load are passed
    (Mirrokni, Thorup and Zadimoghaddam, 2018). Load is work to be done, which does better here than a count of calls.
    """

    def __init__(self, floor: Floor, seed: int) -> None:
        super().__init__(floor, seed)
        points = ((self.chance.random(), machine.number) for machine in self.machines for _ in range(POINTS))
        self._ring = sorted(points)

    def choose(self, job: Job, now: float) -> int:
        work = self.floor.work_s(now)
        bound = BOUND * work.mean()
        start = bisect(self._ring, (self._key(job), 0))
        for step in range(len(self._ring)):
            number = self._ring[(start + step) % len(self._ring)][1]
            if work[number] <= bound:
                return number
        raise AssertionError("no machine has less than the mean")

    def _key(self, job: Job) -> float:
        first = job.arrival.blocks[:1] or (job.number,)
        return int.from_bytes(blake2b(repr(first).encode(), digest_size=8).digest(), "little") / 2**64


class GreedyCost(Cached):
    """Least time to the first token: what must be computed there before, and what of this prompt is not cached."""

    def choose(self, job: Job, now: float) -> int:
        costs = self.loads(now)
        for number, tokens in self.cached(job).items():
            costs[number] -= tokens / self.floor.speed.prefill
        return self.least(costs)


class OneLine(AtOnce):
    """Calls wait in one line, first in, first out, until any machine has a slot: Paddock's own before it knew costs."""

    def __init__(self, floor: Floor, seed: int) -> None:
        super().__init__(floor, seed)
        self._line: deque[Job] = deque()

    async def came(self, job: Job, now: float) -> None:
        self._line.append(job)
        self._serve(now)

    async def ended(self, job: Job, now: float) -> None:
        self._serve(now)

    def _serve(self, now: float) -> None:
        while self._line and self.floor.calls.min() < self.floor.slots:
            self.floor.start(self._line.popleft(), self.least(self.floor.calls.astype(np.float64)), now)


LISTED: dict[str, Callable[[Floor, int], Policy]] = {
    "random": Random,
    "round robin": RoundRobin,
    "least busy": LeastBusy,
    "pure prefix affinity": PureAffinity,
    "bounded-load hashing": BoundedHashing,
    "greedy cost": GreedyCost,
}
