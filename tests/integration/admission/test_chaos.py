"""Whatever happens to Redis, workers and gateways, all at once and at random: the data stays whole and ends empty."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator

import msgspec
import pytest
import redis.asyncio

from gateway.errors import QueueFull, QueueTimeout, Stopping, StoreUnavailable
from gateway.store.client import connect
from gateway.store.integrity import check_integrity
from tests.integration.admission.conftest import Gateway, Lifetimes, Start
from tests.support.pool import beat, call, heartbeat
from tests.support.redis_server import RedisServer
from workers.protocol import keys

GATEWAYS = 3
CALLERS = 40
BLOWS = 25
HOLD_S = 0.03
SHORT = Lifetimes(grant_ttl_s=0.3, timeout_s=1.0)


@pytest.fixture
def fragile(server: RedisServer) -> Iterator[RedisServer]:
    with RedisServer(server.binary) as own:
        yield own


class Chaos:
    """Workers that beat, callers that come and go, and a list of misfortunes to choose from."""

    def __init__(self, server: RedisServer, client: redis.asyncio.Redis, start: Start, seed: int) -> None:
        self.server = server
        self.client = client
        self.start = start
        self.random = random.Random(seed)
        self.over = asyncio.Event()
        self.workers = {f"w{n}": heartbeat(f"w{n}", slots=1 + n) for n in range(4)}
        self.gateways: list[Gateway] = []
        self.num_started = 0
        self.num_served = 0

    async def beat(self) -> None:
        while not self.over.is_set():
            try:
                for record in list(self.workers.values()):
                    await beat(self.client, record, ttl_s=0.6, tell=False)
            except (redis.asyncio.RedisError, OSError):
                pass  # Redis is being restarted
            await asyncio.sleep(0.1)

    async def call_on(self, number: int) -> None:
        """Calls until it is over; any ending that a client could be told of is fine."""
        while not self.over.is_set():
            work = asyncio.create_task(self._call(self.gateways[number % GATEWAYS]))
            impatient = self.random.random() < 0.3
            await asyncio.wait({work}, timeout=self.random.uniform(0, 0.2) if impatient else None)
            work.cancel()
            (ending,) = await asyncio.gather(work, return_exceptions=True)
            if isinstance(ending, StoreUnavailable):
                await asyncio.sleep(0.05)
            elif ending is not None and not isinstance(
                ending, (asyncio.CancelledError, QueueFull, QueueTimeout, Stopping)
            ):
                raise ending

    async def _call(self, gateway: Gateway) -> None:
        avoid = frozenset(self.random.sample(["w0", "w1", "w2"], self.random.choice([0, 0, 0, 1, 2])))
        async with gateway.admission.slot(call(patience_s=self.random.uniform(0.05, 2.0)), avoid):
            self.num_served += 1
            await asyncio.sleep(self.random.uniform(0, HOLD_S))

    async def strike(self) -> None:
        blows: list[Callable[[], Awaitable[object]]] = [
            self.client.flushall,
            self.client.script_flush,
            self._cut_subscriptions,
            self._restart_redis,
            self._change_worker,
            self._change_worker,
            self._lose_worker,
            self._kill_gateway,
        ]
        for _ in range(BLOWS):
            await asyncio.sleep(self.random.uniform(0.02, 0.3))
            await self.random.choice(blows)()
            await check_integrity(self.client, "m")
        self.over.set()

    async def _cut_subscriptions(self) -> None:
        await self.client.client_kill_filter(_type="pubsub")

    async def _restart_redis(self) -> None:
        await asyncio.to_thread(self.server.restart)

    async def _change_worker(self) -> None:
        name = self.random.choice(sorted(self.workers))
        record = self.workers[name]
        if self.random.random() < 0.5:
            self.workers[name] = msgspec.structs.replace(record, boot=f"boot{self.random.random()}")
        else:
            self.workers[name] = msgspec.structs.replace(record, draining=not record.draining)

    async def _lose_worker(self) -> None:
        name = self.random.choice(sorted(self.workers))
        record = self.workers.pop(name)
        self.workers[f"{name}'"] = msgspec.structs.replace(record, worker=f"{name}'", draining=False)

    async def _kill_gateway(self) -> None:
        number = self.random.randrange(GATEWAYS)
        await self.gateways[number].kill()
        self.gateways[number] = await self.start_gateway()

    async def start_gateway(self) -> Gateway:
        self.num_started += 1
        return await self.start(self.server.url, f"g{self.num_started}", lives=SHORT)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
async def test_chaos_leaves_the_data_whole(fragile: RedisServer, start_on: Start, seed: int) -> None:
    async with connect(fragile.url) as client:
        chaos = Chaos(fragile, client, start_on, seed)
        chaos.gateways = [await chaos.start_gateway() for _ in range(GATEWAYS)]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(chaos.beat())
            tasks.create_task(chaos.strike())
            for number in range(CALLERS):
                tasks.create_task(chaos.call_on(number))
        assert chaos.num_served > CALLERS
        for _ in range(300):
            left = await client.hkeys(keys.calls("m")) + await client.zrange(keys.tickets("m"), 0, -1)
            if not left:
                break
            await asyncio.sleep(0.01)
        assert left == []
        await check_integrity(client, "m")
        assert not await client.exists(keys.queue("m"))
