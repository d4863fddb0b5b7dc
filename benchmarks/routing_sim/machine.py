"""One simulated worker: slots, a cache of blocks, and one stream of computing that prompts and answers share."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from benchmarks.routing_sim.traces import BLOCK_TOKENS, Arrival

_NEARLY = 1e-6
"""Tokens; less than this is left of what is done."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What computing takes. Answers are left out where `step_s` is 0 and all answers have one token."""

    prefill: float
    """Prompt tokens a second, with nothing beside."""
    step_s: float = 0.0
    """One step of decoding, whatever it holds."""
    sequence_s: float = 0.0
    """More of it for each sequence."""
    chunk: int = BLOCK_TOKENS
    """Prompt tokens that are computed in one step."""

    def rates(self, prefilling: bool, decoding: int) -> tuple[float, float]:
        """Prompt tokens a second, and tokens a second of each answer."""
        if not decoding:
            return (self.prefill if prefilling else 0.0), 0.0
        step_s = self.step_s + self.sequence_s * decoding
        if not prefilling:
            return 0.0, 1 / step_s
        step_s += self.chunk / self.prefill
        return self.chunk / step_s, 1 / step_s


@dataclass(slots=True, eq=False)
class Job:
    """One call in the simulation. Times are simulated seconds; -1: not yet."""

    number: int
    arrival: Arrival
    machine: int = -1
    cached: int = 0
    """Tokens of the prompt that were cached where it ran."""
    left: float = 0.0
    """Prompt tokens that are not computed yet."""
    accepted_at: float = -1.0
    began_at: float = -1.0
    """When its prompt's turn came."""
    slot_at: float = -1.0
    first_at: float = -1.0
    done_at: float = -1.0

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.arrival.at_s

    @property
    def due_at(self) -> float:
        """When its first token is wanted; 0: it did not say."""
        return self.arrival.at_s + self.arrival.slo_s if self.arrival.slo_s else 0.0

    @property
    def took(self) -> int:
        """Tokens that it is charged for."""
        return self.arrival.tokens - self.cached + self.arrival.answer


class Blocks:
    """What is cached. The least recently used block goes first; of one prompt its end, as a block is worth nothing
    without those before it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._told: OrderedDict[int, bool] = OrderedDict()
        """Block -> whether someone was told of it."""
        self._lost: list[int] = []

    def cached(self, arrival: Arrival) -> int:
        """Tokens of its prompt that are here."""
        there = itertools.takewhile(self._told.__contains__, arrival.blocks)
        return min(arrival.tokens, BLOCK_TOKENS * sum(1 for _ in there))

    def use(self, blocks: tuple[int, ...]) -> None:
        told = self._told
        for block in reversed(blocks[: self.capacity]):
            if block in told:
                told.move_to_end(block)
            else:
                told[block] = False
        while len(told) > self.capacity:
            block, known = told.popitem(last=False)
            if known:
                self._lost.append(block)

    def tell(self, blocks: tuple[int, ...]) -> list[int]:
        """Those that are here and were not told of before."""
        new = [block for block in blocks if self._told.get(block) is False]
        self._told.update(dict.fromkeys(new, True))
        return new

    def take_lost(self) -> list[int]:
        """Blocks that were told of and are gone since the last time."""
        lost, self._lost = self._lost, []
        return [block for block in lost if block not in self._told]


@dataclass(slots=True, eq=False)
class Machine:
    """Prompts are computed one after the other in the order of their slots; answers all together.

    A prompt's blocks count as cached from the moment it is accepted: whoever comes later is computed later.
    """

    number: int
    slots: int
    speed: Speed
    blocks: Blocks
    waiting: deque[Job] = field(default_factory=deque)
    """Accepted, no slot yet."""
    prefilling: deque[Job] = field(default_factory=deque)
    busy: int = 0
    backlog: float = 0.0
    """Prompt tokens of accepted calls that are not computed yet."""
    worked: float = 0.0
    """Prompt tokens that were computed here."""
    next_at: float = inf
    """When something is done here, if nothing comes before."""
    now: float = 0.0
    rates: tuple[float, float] = (0.0, 0.0)
    _said: float = 0.0
    """Tokens that a sequence would have said that decoded here from the beginning."""
    _decoding: list[tuple[float, int, Job]] = field(default_factory=list)

    @property
    def calls(self) -> int:
        return self.busy + len(self.waiting)

    def running(self) -> Iterator[tuple[float, int | None]]:
        """Of each call with a slot: prompt tokens that are left, and tokens of its answer that it has said."""
        yield from ((job.left, None) for job in self.prefilling)
        for end, _, job in self._decoding:
            yield 0.0, job.arrival.answer - max(0, round(end - self._said))

    def accept(self, job: Job, now: float) -> list[Job]:
        """Calls that are done at once, which one with its whole prompt cached and no answer would be."""
        self._run(now)
        job.machine, job.accepted_at = self.number, now
        job.cached = self.blocks.cached(job.arrival)
        job.left = max(1.0, float(job.arrival.tokens - job.cached))
        self.blocks.use(job.arrival.blocks)
        self.backlog += job.left
        self.worked += job.left
        self.waiting.append(job)
        return self._settle(now)

    def advance(self, now: float) -> list[Job]:
        """At `next_at`: calls that are done."""
        self._run(now)
        return self._settle(now)

    def _run(self, now: float) -> None:
        passed, self.now = now - self.now, now
        if self.prefilling:
            computed = min(self.prefilling[0].left, passed * self.rates[0])
            self.prefilling[0].left -= computed
            self.backlog -= computed
        self._said += passed * self.rates[1]

    def _settle(self, now: float) -> list[Job]:
        done: list[Job] = []
        while self.prefilling and self.prefilling[0].left <= _NEARLY:
            job = self.prefilling.popleft()
            job.first_at = now
            if job.arrival.answer > 1 and self.speed.step_s:
                heapq.heappush(self._decoding, (self._said + job.arrival.answer - 1, job.number, job))
            else:
                done.append(job)
        while self._decoding and self._decoding[0][0] <= self._said + _NEARLY:
            done.append(heapq.heappop(self._decoding)[2])
        for job in done:
            job.done_at = now
        self.busy -= len(done)
        while self.waiting and self.busy < self.slots:
            self.busy += 1
            entered = self.waiting.popleft()
            entered.slot_at = now
            self.prefilling.append(entered)
        if self.prefilling and self.prefilling[0].began_at < 0:
            self.prefilling[0].began_at = now
        self._plan()
        return done

    def _plan(self) -> None:
        self.rates = prefill, decode = self.speed.rates(bool(self.prefilling), len(self._decoding))
        ends = []
        if self.prefilling:
            ends.append(max(0.0, self.prefilling[0].left) / prefill)
        if self._decoding:
            ends.append(max(0.0, self._decoding[0][0] - self._said) / decode)
        self.next_at = self.now + min(ends) if ends else inf
