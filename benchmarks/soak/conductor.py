"""The soak as it goes: warming up, a rest, load and faults, a rest, load and milder faults, a rest, the end.

At a rest nobody calls. What is held then is leaked; what a process has open then is compared with the rests after.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from benchmarks.soak.crowd import Crowd
from benchmarks.soak.faults import ALL, HARMLESS, Fault
from benchmarks.soak.fleet import Fleet
from benchmarks.soak.record import FIRST, WARM, Record, Rest, Struck
from benchmarks.soak.storage import Stock, breaches, patiently, take_stock
from benchmarks.soak.subjects import Watch, read_metrics
from gateway.client import ClientError

BREATH_S = 0.5
"""How long a short rest goes on when nothing is held any more."""
REST_S = 40.0
"""Longest time until nothing is held: beyond it what is still there counts as leaked."""
BUSY = ("llamacpp:requests_processing", "llamacpp:requests_deferred", "paddock_requests_in_flight")
LAST_S = 12.0
"""Within which records of everybody who has ended are gone from Redis."""


@dataclass(slots=True)
class Conductor:
    """`record` is complete when `run` has returned."""

    fleet: Fleet
    crowd: Crowd
    record: Record
    tell: Callable[[str], None]
    watch: Watch
    phase: str = "warming up"
    _began: float = field(default_factory=time.monotonic)

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._began

    async def run(self) -> None:
        """The whole of it; the fleet is stopped at the end."""
        plan = self.record.plan
        async with self._looking():
            await self._fill()
            await self._loaded("warming up", plan.warm_s, ALL)
            await self._rest(plan.settle_s)
            self.record.warm_at_s = self.record.rests[-1].at_s
            await self._loaded("every fault", plan.total_s * FIRST, ALL)
            await self._fill()
            await self._rest(plan.settle_s)
            await self._loaded("milder faults", plan.total_s * (1 - WARM - FIRST), HARMLESS)
            await self._rest(plan.settle_s)
        self.phase = "stopping"
        await asyncio.to_thread(self.fleet.stop)
        self.record.exits = self.fleet.exits
        await self._look_behind()

    async def _fill(self) -> None:
        """After the start, and again for those that were restarted since."""
        self.phase = "filling caches"
        await self.crowd.fill()

    async def _loaded(self, phase: str, for_s: float, faults: Sequence[Fault]) -> None:
        """In rounds, with a short rest between two of them."""
        began_s, round_s = self.now_s, self.record.plan.round_s
        ends_s = began_s + for_s
        while ends_s - self.now_s > round_s * 1.5:
            await self._round(phase, round_s, faults)
            await self._rest(BREATH_S)
        await self._round(phase, max(ends_s - self.now_s, self.record.plan.sample_s), faults)
        self.record.loads.append((began_s, self.now_s))

    async def _round(self, phase: str, for_s: float, faults: Sequence[Fault]) -> None:
        self.phase, over = phase, asyncio.Event()
        striking = asyncio.create_task(self._strike(faults, over))
        try:
            await self.crowd.visit(for_s)
        finally:
            over.set()
            await asyncio.wait([striking])
        striking.result()

    async def _strike(self, faults: Sequence[Fault], over: asyncio.Event) -> None:
        """One after the other, in an order of chance, each as often as the others. One that has begun mends itself."""
        chance = self.crowd.chance
        while True:
            for fault in chance.sample(faults, len(faults)):
                with suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), self.record.plan.fault_gap_s)
                if over.is_set():
                    return
                await self._one(fault, chance)

    async def _one(self, fault: Fault, chance: random.Random) -> None:
        began_s, failure = self.now_s, ""
        try:
            await fault(self.fleet, chance)
        except (RedisError, OSError, TimeoutError, ClientError, RuntimeError, KeyError) as error:
            failure = f"{type(error).__name__}: {error}"[:300]
        self.record.faults.append(Struck(began_s, fault.__name__, failure))

    async def _rest(self, settle_s: float) -> None:
        """Waits until nothing is held, then so long, and looks at everybody."""
        self.phase, began_s = "a rest", self.now_s
        while (held := await self._held()) and self.now_s - began_s < REST_S:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.25)
        took_s = self.now_s - began_s
        await asyncio.sleep(settle_s)
        stock, busy = await self._stock(), await self._busy()
        pids = await self._look()
        lives = {name: self.watch.subjects[name].life for name in pids}
        self.record.rests.append(
            Rest(
                at_s=self.now_s,
                took_s=took_s,
                is_long=settle_s > BREATH_S,
                held=stock.held() or {name: round(count) for name, count in held.items() if name in busy},
                busy=busy,
                breaches=await patiently(lambda: breaches(self.fleet.client, self.fleet.models)),
                stock=stock,
                samples={name: life.samples[-1] for name, life in lives.items() if life.samples},
                pids=pids,
            )
        )

    async def _stock(self) -> Stock:
        return await patiently(lambda: take_stock(self.fleet.client, self.now_s))

    async def _held(self) -> dict[str, float]:
        stock = await self._stock()
        return {**stock.held(), **await self._busy()}

    async def _busy(self) -> dict[str, float]:
        """Of those that tell metrics: the calls that they have; one that should and does not may have any."""
        urls = await self._urls()
        told = await asyncio.gather(*(asyncio.to_thread(read_metrics, url) for url in urls.values()))
        named = dict(zip(urls, told, strict=True))
        sums = {name: sum(one.get(metric, 0.0) for metric in BUSY) for name, one in named.items()}
        silent = {f"{name}, which tells nothing": 1.0 for name, one in named.items() if not one}
        return {name: count for name, count in sums.items() if count} | silent

    async def _urls(self) -> dict[str, str]:
        gateways = {gateway.name: gateway.url for gateway in self.fleet.gateways}
        return gateways | await self.fleet.worker_urls()

    async def _look(self) -> dict[str, int]:
        """One sample of everybody."""
        pids, urls = self.fleet.pids(), await self._urls()
        await asyncio.to_thread(self.watch.look, self.now_s, pids, urls)
        return pids

    @asynccontextmanager
    async def _looking(self) -> AsyncIterator[None]:
        looking = asyncio.create_task(self._look_on())
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.wait([looking])
        if not looking.cancelled():
            looking.result()

    async def _look_on(self) -> None:
        while True:
            with suppress(RedisError, OSError):
                await self._look()
                self.record.stocks.append(await self._stock())
            self.tell(self.line())
            await asyncio.sleep(self.record.plan.sample_s)

    async def _look_behind(self) -> None:
        """What is left of them: keys that say who holds or who is there, and processes."""
        ends_s = self.now_s + LAST_S
        while True:
            stock = await self._stock()
            here = {name: n for name, n in stock.families.items() if name in ("pd:gateway:", "pd:{}:worker:")}
            self.record.leftovers = stock.held() | here
            self.record.orphans = [line for line in self.watch.orphans() if "redis-server" not in line]
            if not (self.record.leftovers or self.record.orphans) or self.now_s > ends_s:
                return
            await asyncio.sleep(0.25)

    def line(self) -> str:
        """Where it stands, in one line."""
        minutes = f"{self.now_s / 60:.1f} of {self.record.plan.total_s / 60:.0f} min, {self.phase}"
        crowd = f"{self.record.num_deeds} deeds, {self.crowd.num_there} now, {self.record.num_surprises} surprises"
        last = f"last fault: {self.record.faults[-1].fault}" if self.record.faults else "no fault yet"
        sizes = " ".join(
            f"{name} {subject.life.samples[-1].rss:.0f}"
            for name, subject in sorted(self.watch.subjects.items())
            if subject.life.samples and not name.startswith("passing-")
        )
        return f"{minutes}; {crowd}; {last}; MiB: {sizes}"
