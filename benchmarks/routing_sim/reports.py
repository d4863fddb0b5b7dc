"""What simulated workers tell of themselves: the records and news that true workers write, with simulated times."""

from __future__ import annotations

from collections import deque
from itertools import accumulate

from benchmarks.routing_sim.machine import Job, Machine
from benchmarks.routing_sim.traces import BLOCK_TOKENS, Arrival
from workers.protocol.heartbeat import Heartbeat, Load, ModelFacts, News
from workers.protocol.prefixes import Prefix

MODEL = "m"
BYTES_PER_TOKEN = 4
BOOT = "boot"
_LAST_ANSWERS = 256
_USUAL = 0.9
_WEIGHT = 0.1
_SPREAD = 0x9E3779B97F4A7C15
"""Odd, so that no two blocks have one head; heads are as evenly spread as hashes are."""


def worker_id(machine: int) -> str:
    return f"w{machine}"


def machine_number(worker: str) -> int:
    return int(worker[1:])


def head(block: int) -> int:
    return block * _SPREAD % 2**64


def prefix_of(arrival: Arrival) -> Prefix:
    """As a gateway would find it: block ids are hashes of everything before already."""
    ends = (min(number * BLOCK_TOKENS, arrival.tokens) for number in range(1, len(arrival.blocks) + 1))
    return Prefix(
        tuple(head(block) for block in arrival.blocks),
        tuple(end * BYTES_PER_TOKEN for end in ends),
        arrival.tokens * BYTES_PER_TOKEN,
    )


class Reporter:
    """One worker's: what it has seen of its calls, and the numbers of its news."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.told_at = 0.0
        self._version = 0
        self._added: dict[int, int] = {}
        self._answers: deque[int] = deque(maxlen=_LAST_ANSWERS)
        self._hold_s = 0.0

    def ended(self, job: Job) -> None:
        """A call is over: what of it is cached is told with the next news."""
        ends = {block: (number + 1) * BLOCK_TOKENS for number, block in enumerate(job.arrival.blocks)}
        for block in self.machine.blocks.tell(job.arrival.blocks):
            self._added[head(block)] = min(ends[block], job.arrival.tokens)
        self._answers.append(job.arrival.answer)
        held_s = job.done_at - job.slot_at
        self._hold_s += (held_s - self._hold_s) * (_WEIGHT if self._hold_s else 1.0)

    def heartbeat(self, now: float) -> Heartbeat:
        machine, load = self.machine, self.load(now)
        return Heartbeat(
            worker=worker_id(machine.number),
            boot=BOOT,
            model=MODEL,
            address=f"http://{worker_id(machine.number)}:1",
            slots=machine.slots,
            slots_busy=load.slots_busy,
            n_ctx=1 << 20,
            kv_tokens=1 << 30,
            kv_tokens_used=0,
            facts=ModelFacts(n_ctx_train=1 << 20, n_params=1, size=1, n_vocab=1),
            load=load,
            version=self._version,
        )

    def news(self, now: float) -> News:
        self._version += 1
        self.told_at = now
        lost = [head(block) for block in self.machine.blocks.take_lost()]
        added, self._added = self._added, {}
        for gone in lost:
            added.pop(gone, None)
        return News(
            model=MODEL,
            worker=worker_id(self.machine.number),
            boot=BOOT,
            version=self._version,
            load=self.load(now),
            added=added,
            dropped=tuple(lost),
        )

    def load(self, now: float) -> Load:
        machine = self.machine
        passed = now - machine.now
        decode_s = 1 / machine.rates[1] if machine.rates[1] else machine.speed.step_s
        return Load(
            slots_busy=machine.busy,
            waiting=len(machine.waiting),
            backlog_tokens=max(0, round(machine.backlog - passed * machine.rates[0])),
            free_in_ms=self._free_in_s(passed, decode_s) * 1000,
            prefill_ms=1000 / machine.speed.prefill,
            decode_ms=max(0.001, decode_s * 1000),
            hold_ms=self._hold_s * 1000,
            answer_tokens=sorted(self._answers)[int(_USUAL * len(self._answers))] if self._answers else 0.0,
            bytes_per_token=BYTES_PER_TOKEN,
        )

    def _free_in_s(self, passed: float, decode_s: float) -> float:
        """By how long answers have been, not by how long these will be."""
        machine = self.machine
        if machine.calls < machine.slots:
            return 0.0
        running = list(machine.running())
        prompts = accumulate(left for left, _ in running)
        ends = [
            before / machine.speed.prefill + self._answer_left(said or 0) * decode_s
            for before, (_, said) in zip(prompts, running, strict=True)
        ]
        return max(0.001, min(ends) - passed)

    def _answer_left(self, said: int) -> float:
        longer = [answer for answer in self._answers if answer > said]
        return sum(longer) / len(longer) - said if longer else float(max(64, said))
