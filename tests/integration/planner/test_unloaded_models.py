"""The planner hears which calls wait: at once of those for a model that an admin had unloaded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest
import redis.asyncio

from tests.support.redis_server import RedisServer
from tests.unit.workers.planner.reports import catalog, report
from workers.planner.coordinator import Coordinator
from workers.planner.planner import Decision
from workers.protocol import keys, residency
from workers.protocol.residency import SILENT_S, GatewayDemand, ModelDemand
from workers.redis import link

MACHINE = "host1"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    async with link.connect(server.url, timeout_s=2.0, retries=0) as connected:
        yield connected


async def decided(coordinator: Coordinator, client: redis.asyncio.Redis) -> Decision:
    """Return what is decided while a call waits for the model `a`, once this machine plans."""
    before = found = coordinator.decision
    async with asyncio.timeout(30):
        while found is before or found is None:
            now = time.time()
            waiting = GatewayDemand(at=now, models={"a": ModelDemand(num_waiting=1, oldest_at=now - 0.1)})
            await client.hset(keys.DEMAND, "gateway", residency.encode(waiting))
            await coordinator.look({}, now)
            await coordinator.orders(report(now), catalog(a=1), now)
            found = coordinator.decision
            await asyncio.sleep(0.02)
    return found


async def test_a_call_takes_an_unload_back_at_once(client: redis.asyncio.Redis) -> None:
    """It took half a second, within which calls could be told that waiting is in vain."""
    unloaded = {"a"}

    async def marked(models: Sequence[str]) -> frozenset[str]:
        return frozenset(unloaded.intersection(models))

    coordinator = Coordinator(client, MACHINE, marked)
    first = await decided(coordinator, client)
    assert [wait.reason for wait in first.plan.waits()] == ["unloaded"]
    unloaded.clear()
    then = await decided(coordinator, client)
    assert [start.model for start in then.plan.starts()] == ["a"]


async def test_a_gateway_that_is_silent_has_nothing_loaded(client: redis.asyncio.Redis) -> None:
    """One that was killed has no callers any more; what it told last counted for five seconds."""

    async def marked(models: Sequence[str]) -> frozenset[str]:
        return frozenset()

    coordinator = Coordinator(client, "host2", marked)
    now = time.time()
    waiting = GatewayDemand(at=now, models={"a": ModelDemand(num_waiting=1, oldest_at=now, num_running=1, used_at=now)})
    await client.hset(keys.DEMAND, "gateway", residency.encode(waiting))
    await coordinator.look({}, now)
    assert coordinator.demand()["a"].num_waiting == 1
    await asyncio.sleep(SILENT_S + 0.2)
    await coordinator.look({}, time.time())
    demand = coordinator.demand()["a"]
    assert (demand.num_waiting, demand.oldest_at) == (0, 0.0)
    assert demand.num_running == 1, "a worker may still have calls that the gateway has given it"
