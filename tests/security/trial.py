"""Attacks beside one victim: what the victim felt, undisturbed and attacked, and what the processes took."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import psutil

from tests.security.attack import Attack, Target, carry_out
from tests.security.host import watched_host
from tests.security.victim import Felt, decode_felt

MAX_ADDED_GAP_S = 0.1
MAX_TTFT_FACTOR = 2.0
TTFT_NOISE_S = 0.05
"""Twice a few milliseconds is no sign of anything."""
MAX_MEMORY_FACTOR, MAX_MEMORY_EXTRA = 2.0, 256 << 20
BACK_FACTOR = 1.1
HELPERS = " helpers"
"""Of a process: those that it starts, all together."""
KEEPS = frozenset({"redis", "gateway helpers", "worker helpers"})
"""What teams store stays in Redis until its time is over; quotas bound it. A helper stays once it has been needed."""
MEMORY_LOOK_S, HELPERS_LOOK_S, REST_LOOK_S = 0.1, 1.0, 1.0
UNDISTURBED_S = 4.0
NUM_KEPT, KEPT_TOKENS = 64, 400
"""Prompts that fill what a worker keeps of them in RAM, and their tokens."""
CROWD, CROWD_TOKENS = 200, 30
"""Callers who ask for an ordinary answer at the same time, and the tokens of each answer."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an attack may do to others; the defaults are what the project promises on a quiet machine."""

    added_gap_s: float = MAX_ADDED_GAP_S
    ttft_factor: float = MAX_TTFT_FACTOR
    ttft_noise_s: float = TTFT_NOISE_S
    rest_s: float = 0.0
    """Within so long after the attack memory is what it was before; 0: that is not looked at."""


@dataclass(slots=True)
class Memory:
    """Resident bytes of one process: before the attack, at most during it, and some time after it."""

    quiet: int
    most: int = 0
    after: int = 0


@dataclass(slots=True)
class Outcome:
    """What came of attacks, one after the other."""

    rounds: dict[str, int]
    """Begun, by attack."""
    calm: Felt
    attacked: Felt
    memory: dict[str, Memory]
    dead: list[str] = field(default_factory=list)
    """Processes that were there before and are not any more."""
    stolen: float = 0.0
    """Share of the processors' time that the machine's host gave to others meanwhile: gaps may be its own."""

    def complaints(self, bounds: Bounds) -> list[str]:
        """Return a line for everything that is out of bounds."""
        lines = [f"{name} ended" for name in self.dead]
        if not self.attacked.num_streams:
            lines.append("the victim got no answer")
        lines += [f"the victim got {error}" for error in self.attacked.errors[:3]]
        added_s = self.attacked.longest_gap_s - self.calm.longest_gap_s
        if added_s > bounds.added_gap_s:
            lines.append(f"the longest gap grew by {added_s:.2f} s (bound {bounds.added_gap_s:g} s)")
        most_s = max(self.calm.ttft_p95_s * bounds.ttft_factor, self.calm.ttft_p95_s + bounds.ttft_noise_s)
        if self.attacked.ttft_p95_s > most_s:
            lines.append(f"TTFT p95 was {self.attacked.ttft_p95_s:.2f} s (bound {most_s:.2f} s)")
        for name, memory in self.memory.items():
            if memory.most > memory.quiet * MAX_MEMORY_FACTOR + MAX_MEMORY_EXTRA:
                lines.append(f"{name} took {memory.most >> 20} MiB (quiet: {memory.quiet >> 20})")
            if bounds.rest_s and not _is_back(name, memory):
                lines.append(f"{name} kept {memory.after >> 20} MiB (before: {memory.quiet >> 20})")
        return lines


async def undisturbed(target: Target, seconds: float = UNDISTURBED_S) -> Felt:
    """Measure the victim with nothing beside it."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, over.set)
    return await _victim(target, over)


async def warm_up(target: Target) -> None:
    """Fill the workers' caches of prompts, and serve an ordinary crowd: growth by these is neither a leak nor an
    attack's. A gateway that has served 200 callers at once stays 5 MiB larger than one that has just started."""
    prompts = [
        [300 + (number * 13 + place * number) % 400 for place in range(KEPT_TOKENS)] for number in range(NUM_KEPT)
    ]
    async with target.session() as session:
        for prompt in prompts:
            body = {"model": target.model, "prompt": prompt, "n_predict": 1}
            if (status := await target.post(session, "/completion", body)) != 200:
                raise RuntimeError(f"the caches can't be filled: /completion answered {status}")
        bodies = [
            {"model": target.model, "max_tokens": CROWD_TOKENS, "messages": [{"role": "user", "content": f"Story {n}"}]}
            for n in range(CROWD)
        ]
        statuses = await asyncio.gather(*(target.post(session, "/v1/chat/completions", body) for body in bodies))
        if set(statuses) != {200}:
            raise RuntimeError(f"an ordinary crowd can't be served: {sorted(set(statuses))}")


async def try_attacks(
    course: Sequence[tuple[Attack, float]], target: Target, calm: Felt, pids: Mapping[str, int], bounds: Bounds
) -> Outcome:
    """Carry attacks out beside one victim, each for its seconds. `pids`: processes of the service here, by name."""
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    memory = {name: Memory(_rss(process)) for name, process in processes.items()}
    memory |= {
        name + HELPERS: Memory(_of_helpers(process)) for name, process in processes.items() if process.children()
    }
    watcher = asyncio.create_task(_watch(processes, memory))
    over = asyncio.Event()
    victim = asyncio.create_task(_victim(target, over))
    before = psutil.cpu_times()
    try:
        rounds = {attack.name: await carry_out(attack, target, seconds) for attack, seconds in course}
        over.set()
        attacked = await victim
        await _rest(processes, memory, bounds.rest_s)
    finally:
        for task in (victim, watcher):
            task.cancel()
        await asyncio.wait((victim, watcher))
    dead = [name for name, process in processes.items() if not process.is_running() or _rss(process) == 0]
    return Outcome(rounds, calm, attacked, memory, dead, _stolen_since(before))


def _stolen_since(before: Any) -> float:
    """Return the share that went to other guests of the host since then; 0 where the kernel does not tell."""
    now = psutil.cpu_times()
    spent = float(sum(now) - sum(before))
    stolen = float(getattr(now, "steal", 0.0) - getattr(before, "steal", 0.0))
    return stolen / spent if spent > 0 else 0.0


async def _rest(processes: Mapping[str, psutil.Process], memory: Mapping[str, Memory], rest_s: float) -> None:
    """Return when every process has given its memory back, or the time is over."""
    until = time.monotonic() + rest_s
    while True:
        for name, process in processes.items():
            memory[name].after = _rss(process)
            if helpers := memory.get(name + HELPERS):
                helpers.after = _of_helpers(process)
        if time.monotonic() >= until or all(_is_back(name, each) for name, each in memory.items()):
            return
        await asyncio.sleep(REST_LOOK_S)


def _is_back(name: str, memory: Memory) -> bool:
    return name in KEEPS or memory.after <= memory.quiet * BACK_FACTOR


async def _watch(processes: Mapping[str, psutil.Process], memory: Mapping[str, Memory]) -> None:
    looks = 0
    while True:
        for name, process in processes.items():
            memory[name].most = max(memory[name].most, _rss(process))
            helpers = memory.get(name + HELPERS)
            if helpers is not None and looks % round(HELPERS_LOOK_S / MEMORY_LOOK_S) == 0:
                helpers.most = max(helpers.most, _of_helpers(process))
        looks += 1
        await asyncio.sleep(MEMORY_LOOK_S)


def _rss(process: psutil.Process) -> int:
    """Return resident bytes; 0 for a process that has ended."""
    with contextlib.suppress(psutil.Error):
        return 0 if process.status() == psutil.STATUS_ZOMBIE else int(process.memory_info().rss)
    return 0


def _of_helpers(process: psutil.Process) -> int:
    """Return the bytes that the processes it has started hold for themselves: what they share is counted at it."""
    held = 0
    with contextlib.suppress(psutil.Error):
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                held += int(child.memory_full_info().uss)
    return held


async def _victim(target: Target, over: asyncio.Event) -> Felt:
    command: Sequence[str] = ("-m", "tests.security.victim", target.url, target.model)
    pipe = asyncio.subprocess.PIPE
    trusting = {"SSL_CERT_FILE": target.authority} if target.authority else {}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdin=pipe, stdout=pipe, env={**os.environ, **trusting}
    )
    try:
        assert process.stdin is not None
        process.stdin.write(target.victim_key.encode() + b"\n")
        async with watched_host() as pauses:
            await over.wait()
            process.stdin.close()
            output, _ = await process.communicate()
        return msgspec.structs.replace(decode_felt(output), pauses=pauses)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
