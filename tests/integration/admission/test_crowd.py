"""Many impatient callers at once: no slot is ever given twice, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
import redis.asyncio

from gateway.errors import QueueFull, QueueTimeout
from gateway.store.integrity import check_integrity
from tests.integration.admission.conftest import Gateway, Start
from tests.support.pool import beat, call, heartbeat
from workers.protocol import keys

SLOTS = {"w1": 3, "w2": 5, "w3": 1}
CALLERS = 200


class Crowd:
    """Callers that come, wait, hold a slot for a moment, and sometimes go away in the middle of it."""

    def __init__(self, gateways: list[Gateway], seed: int) -> None:
        self.gateways = gateways
        self.random = random.Random(seed)
        self.holding: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()

    async def caller(self, number: int) -> None:
        gateway = self.gateways[number % len(self.gateways)]
        for _ in range(3):
            work = asyncio.create_task(
                self._call(gateway, self.random.uniform(0.01, 2.0), self.random.uniform(0, 0.01))
            )
            impatient = self.random.random() < 0.4
            await asyncio.wait({work}, timeout=self.random.uniform(0, 0.15) if impatient else None)
            work.cancel()
            for outcome in await asyncio.gather(work, return_exceptions=True):
                self.outcomes[type(outcome).__name__] += 1

    async def _call(self, gateway: Gateway, patience_s: float, hold_s: float) -> None:
        avoid = frozenset({"w2"} if self.random.random() < 0.2 else ())
        async with gateway.admission.slot(call(patience_s=patience_s), avoid) as lease:
            self.holding[lease.at.worker] += 1
            try:
                assert self.holding[lease.at.worker] <= SLOTS[lease.at.worker]
                await asyncio.sleep(hold_s)
            finally:
                self.holding[lease.at.worker] -= 1


async def watch(client: redis.asyncio.Redis, over: asyncio.Event) -> None:
    while not over.is_set():
        await check_integrity(client, "m")
        await asyncio.sleep(0.02)


@pytest.mark.serial
async def test_no_slot_is_given_twice(client: redis.asyncio.Redis, start: Start) -> None:
    for worker, slots in SLOTS.items():
        await beat(client, heartbeat(worker, slots=slots))
    gateways = [await start("g1", max_queue=150), await start("g2", max_queue=150)]
    crowd = Crowd(gateways, seed=20)
    over = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch(client, over))
        await asyncio.gather(*(crowd.caller(number) for number in range(CALLERS)))
        over.set()
    expected = {"NoneType", "CancelledError", QueueTimeout.__name__, QueueFull.__name__}
    assert set(crowd.outcomes) <= expected, crowd.outcomes
    assert crowd.outcomes["NoneType"] >= CALLERS // 10, "how many depends on the machine"
    assert crowd.outcomes["CancelledError"] > 10
    for gateway in gateways:
        await gateway.store.close()
        assert (gateway.admission.waiting("m"), gateway.admission.in_flight("m")) == (0, 0)
    left = [await client.zcard(keys.worker_leases("m", worker)) for worker in SLOTS]
    assert left == [0, 0, 0]
    assert not await client.exists(keys.queue("m"), keys.tickets("m"))
