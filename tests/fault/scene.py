"""A fleet with calls in every phase at once, so that one blow hits all of them.

Each phase has a pool of its own, named after it, with one worker:

    queued      waits in the line behind a call that holds the only slot
    granted     has been granted that slot while its gateway is stopped, so the grant is not claimed
    prefilling  holds a slot; no token has come yet
    streaming   holds a slot; tokens come
    draining    the same, and its worker has been told to stop
"""

from __future__ import annotations

import asyncio
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import redis
import redis.asyncio

from gateway.store.client import connect
from gateway.store.integrity import check_integrity
from tests.fault.book import Book, Figures, Record, keeping_book
from tests.support.stack import Process, Stack
from tests.support.waiting import until
from workers.protocol import keys

PHASES = ("queued", "granted", "prefilling", "streaming", "draining")
STEP_MS, PREFILL_MS = 10, 1200
LONG, SHORT = 300, 60
"""Tokens: three seconds, and half of one."""
TOLD_S = 0.05
"""What a worker has done is known to its gateways after this."""
FLAGS = ("--step-ms", str(STEP_MS), "--tokens", "5000", "--drain-s", "30")
LOOK_S = 0.1


@dataclass(slots=True)
class Scene:
    """Two gateways, one worker per phase, and a book of all calls. Enter with `staged`."""

    stack: Stack
    book: Book
    doomed: Process
    other: Process
    workers: dict[str, Process] = field(default_factory=dict)
    """By phase: the one that is to be struck."""
    struck: set[str] = field(default_factory=set)
    struck_at: float = 0.0
    tallies: dict[str, Path] = field(default_factory=dict)
    addresses: set[str] = field(default_factory=set)
    """Of all workers so far: a dead one's record outlives it."""
    redis_down: bool = False
    over: bool = False
    looks: int = 0
    """How often the data in Redis was found whole meanwhile."""

    def worker(self, phase: str, *flags: str, slots: int, wait: bool = True) -> Process:
        """The next worker of a pool, under the id that the one before had, as a supervisor would start it."""
        name = f"{phase}-{len(self.tallies)}"
        self.tallies[name] = self.stack.folder / f"{name}.tally"
        tally = ("--tally", str(self.tallies[name]))
        worker = self.stack.fake_worker(phase, *FLAGS, *flags, *tally, worker_id=f"{phase}-w", slots=slots, wait=wait)
        worker.name = name
        self.workers[phase] = worker
        return worker

    async def staff(self, *phases: str) -> None:
        """A worker for each of these pools, all started at once."""
        slots = {"queued": 1, "granted": 1}
        flags = {"prefilling": ("--prefill-ms", str(PREFILL_MS))}
        hired = [self.worker(phase, *flags.get(phase, ()), slots=slots.get(phase, 2), wait=False) for phase in phases]
        for phase, process in zip(phases, hired, strict=True):
            await self.await_worker(phase, process)

    async def all_seen(self, *models: str) -> None:
        """Both gateways know a worker of each."""
        for gateway in (self.doomed, self.other):
            await asyncio.to_thread(self.stack.wait_until_ready, gateway)
        places = [(gateway, model) for gateway in (self.doomed, self.other) for model in models]
        await until(lambda: all(seen(gateway, model) for gateway, model in places), 5, "all seen")

    async def await_worker(self, phase: str, process: Process) -> None:
        """Until this very process is registered."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            beat = self.stack.heartbeat(phase, f"{phase}-w")
            if beat is not None and not beat.draining and beat.address not in self.addresses:
                self.addresses.add(beat.address)
                process.url = beat.address
                return
            assert process.popen.poll() is None, process.text()[-2000:]
            await asyncio.sleep(0.02)
        raise AssertionError(f"{process.name} did not register")

    async def bring_into(self, phase: str) -> tuple[Record, Record]:
        """A call at the doomed gateway in that phase, and another one of its pool at the other gateway."""
        doomed, other, ask = self.doomed, self.other, self.book.ask
        if phase in ("queued", "granted"):
            holder = ask(other, phase, LONG)
            await holder.has_begun()
            record = ask(doomed, phase, SHORT)
            await until(lambda: self.waiting(phase) == 1, 5, "the call waits in line")
            return record, holder
        bystander = ask(other, phase, LONG)
        record = ask(doomed, phase, LONG)
        if phase == "prefilling":
            await until(lambda: running(self.workers[phase]) == 2, 5, "both calls have a slot")
            await asyncio.sleep(TOLD_S)
            return record, bystander
        await asyncio.gather(bystander.has_begun(), record.has_begun())
        if phase == "draining":
            self.workers[phase].signal(signal.SIGTERM)
            await until(lambda: self.is_draining(phase), 5, "the worker drains")
        return record, bystander

    async def all_phases(self) -> tuple[dict[str, Record], dict[str, Record]]:
        """Calls in every phase; the doomed gateway is stopped then, for the sake of the grant."""
        order = ("streaming", "draining", "queued", "granted", "prefilling")
        pairs = {phase: await self.bring_into(phase) for phase in order}
        self.doomed.signal(signal.SIGSTOP)
        await pairs["granted"][1].leave()
        await until(lambda: self.waiting("granted") == 0 and self.stack.leases("granted") == 1, 5, "the grant")
        assert not pairs["prefilling"][0].begun.is_set()
        return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}

    async def ends(self, records: Iterable[Record], timeout_s: float = 30.0) -> None:
        """Every one of these callers gets an answer, an error, or sees its connection break."""
        await asyncio.gather(*(record.end(timeout_s) for record in records))

    def strike(self, number: signal.Signals, *victims: Process) -> None:
        self.struck_at = time.monotonic()
        for victim in victims:
            victim.signal(number)
            self.struck.add(victim.name)

    def last_end_s(self, records: Iterable[Record]) -> float:
        """From the blow to the last of these ends."""
        return max(record.ended_at for record in records) - self.struck_at

    def waiting(self, model: str) -> int:
        with redis.Redis(unix_socket_path=str(self.stack.redis.socket)) as client:
            return int(client.zcard(keys.queue(model)))

    def is_draining(self, phase: str) -> bool:
        beat = self.stack.heartbeat(phase, f"{phase}-w")
        return beat is None or beat.draining

    def left(self) -> list[str]:
        """What is leased or in line, of any model."""
        with redis.Redis(unix_socket_path=str(self.stack.redis.socket)) as client:
            patterns = ("pd:{*}:calls", "pd:{*}:expiries", "pd:{*}:held:*")
            return sorted(str(name) for pattern in patterns for name in client.keys(pattern))

    def busy(self) -> int:
        """Slots that living workers say are busy."""
        alive = [phase for phase, worker in self.workers.items() if worker.popen.poll() is None]
        beats = [self.stack.heartbeat(phase, f"{phase}-w") for phase in alive]
        return sum(beat.slots_busy for beat in beats if beat is not None)

    async def at_rest(self, timeout_s: float) -> float:
        """Until nothing is leased, nothing waits and no worker computes; the seconds that took."""
        await until(lambda: not self.left(), timeout_s, f"nothing leased: {self.left()}")
        took_s = await until(lambda: not self.busy(), timeout_s, "no worker computes")
        async with connect(self.stack.redis.url) as client:
            for phase in self.workers:
                await check_integrity(client, phase)
        return took_s

    def check_counts(self) -> Figures:
        """What callers, gateways and workers say agrees."""
        figures = self.book.check(self.stack.gateways, self.tallies.values(), frozenset(self.struck))
        for phase, worker in self.workers.items():
            if phase != "draining" and worker.popen.poll() is None:  # one that drains ends by itself
                assert generated(worker) <= sum_of(self.tallies[worker.name])
        return figures

    async def report(self, what: str, rest_s: float) -> None:
        """Asserts that all is whole, at rest and agreed upon; prints what it took."""
        took_s = await self.at_rest(rest_s)
        figures = self.check_counts()
        print(f"\n{what}: at rest after {took_s:.2f} s, whole {self.looks} times; {figures}; {self.book.endings()}")

    async def watch(self) -> None:
        """Looks at the data again and again; a Redis that is being struck may be silent."""
        while not self.over:
            async with connect(self.stack.redis.url) as client:
                try:
                    for phase in self.workers:
                        await check_integrity(client, phase)
                    self.looks += 1
                except (redis.RedisError, OSError):
                    assert self.redis_down
            await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def staged(stack: Stack, phases: tuple[str, ...] = PHASES) -> AsyncIterator[Scene]:
    """Two gateways, the last of the stack, workers for these phases; the data is watched meanwhile."""
    while len([gateway for gateway in stack.gateways if gateway.popen.poll() is None]) < 2:
        stack.gateway(wait=False, ping_interval_s=0.5)
    doomed, other = [gateway for gateway in stack.gateways if gateway.popen.poll() is None][-2:]
    async with keeping_book(stack.key) as book:
        scene = Scene(stack, book, doomed, other)
        await scene.staff(*phases)
        if phases:
            await scene.all_seen(*phases)
        watching = asyncio.create_task(scene.watch())
        try:
            yield scene
        except BaseException:
            for process in stack.processes:
                print(f"--- {process.name} (exit {process.popen.poll()}) ---\n{process.text()[-40000:]}")
            raise
        finally:
            scene.over = True
            await asyncio.wait([watching])
            for worker in scene.workers.values():
                worker.signal(signal.SIGCONT)
                worker.kill()
        watching.result()


def seen(gateway: Process, model: str) -> bool:
    """Whether the gateway knows a worker of the model."""
    with urllib.request.urlopen(f"{gateway.url}/metrics", timeout=5) as answer:
        return f'paddock_workers{{model="{model}"}} 1.0' in answer.read().decode()


def generated(worker: Process) -> int:
    """Tokens that a worker's metrics say it made."""
    return _sample(worker, "vllm:generation_tokens_total")


def running(worker: Process) -> int:
    """Calls that hold a slot of the worker, as it says itself."""
    return _sample(worker, "vllm:num_requests_running")


def _sample(worker: Process, name: str) -> int:
    with urllib.request.urlopen(f"{worker.url}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(name + "{"))


def sum_of(tally: Path) -> int:
    return len(tally.read_text().split()) if tally.exists() else 0
