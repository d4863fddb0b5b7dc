"""The planner's lease on a real Redis, with no more rights than a supervisor has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis.asyncio

from tests.support.redis_server import RedisServer, redis_binaries, redis_version
from workers.planner import lease as lease_module
from workers.planner.lease import LEASE_S, MARGIN_S, Lease
from workers.protocol import keys
from workers.redis import link


@pytest.fixture(scope="module", params=redis_binaries(), ids=redis_version)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    binary: Path = request.param
    with RedisServer(binary) as running:
        yield running


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    async with link.connect(server.url, timeout_s=2.0, retries=0) as operator:
        await operator.flushall()
    async with link.connect(server.url_of("supervisor"), timeout_s=2.0, retries=0) as connected:
        yield connected


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def look(lease: Lease, client: redis.asyncio.Redis) -> None:
    """Do what each round of a supervisor does."""
    asked_at = lease.clock()
    async with client.pipeline(transaction=False) as pipeline:
        lease.ask(pipeline)
        lease.note(await pipeline.execute(), asked_at)
    await lease.contend(client)


async def test_one_of_several_is_elected_and_stays(client: redis.asyncio.Redis) -> None:
    leases = [Lease(name) for name in "abc"]
    for _ in range(3):
        for each in leases:
            await look(each, client)
        assert [each.holds() for each in leases] == [True, False, False]
    assert [each.holder for each in leases] == ["a", "a", "a"]
    assert leases[0].fence == 1


async def test_the_next_one_has_a_higher_number(client: redis.asyncio.Redis) -> None:
    first, second = Lease("a"), Lease("b")
    await look(first, client)
    await first.give_back(client)
    assert not first.holds()
    await look(second, client)
    assert second.holds()
    assert second.fence > 1
    await look(first, client)
    assert (first.holds(), first.holder) == (False, "b")


async def test_a_lease_that_is_not_renewed_ends_and_its_holder_stops_before(
    client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "LEASE_S", 0.5)
    monkeypatch.setattr(lease_module, "MARGIN_S", 0.2)
    first, second = Lease("a"), Lease("b")
    await look(first, client)
    await look(second, client)
    assert first.holds()
    while first.holds():
        assert await client.get(keys.PLANNER), "it stops before Redis lets others in"
        await asyncio.sleep(0.01)
    while not second.holds():
        await look(second, client)
        await asyncio.sleep(0.01)
    await look(first, client)
    assert not first.holds()
    assert second.holds()


async def test_a_holder_that_was_stopped_holds_nothing_when_it_wakes(client: redis.asyncio.Redis) -> None:
    clock = Clock()
    lease = Lease("a", clock)
    await look(lease, client)
    clock.now += LEASE_S - MARGIN_S
    assert not lease.holds()


async def test_the_answer_counts_from_before_it_was_asked_for(client: redis.asyncio.Redis) -> None:
    """A process may be stopped between its question and the answer."""
    clock = Clock()
    lease = Lease("a", clock)
    await look(lease, client)
    asked_at = clock()
    async with client.pipeline(transaction=False) as pipeline:
        lease.ask(pipeline)
        answers = await pipeline.execute()
    clock.now += LEASE_S
    lease.note(answers, asked_at)
    assert not lease.holds()


async def test_a_lost_lease_is_noticed_by_its_word_not_by_the_machines_name(client: redis.asyncio.Redis) -> None:
    old, new = Lease("a"), Lease("a")
    await look(old, client)
    await look(new, client)  # the same machine's supervisor, started anew: it does not wait
    assert new.holds()
    assert new.fence > old.fence
    async with client.pipeline(transaction=False) as pipeline:
        old.ask(pipeline)
        old.note(await pipeline.execute(), old.clock())
    assert not old.holds()


async def test_a_redis_that_has_lost_its_data_counts_on(client: redis.asyncio.Redis, server: RedisServer) -> None:
    lease = Lease("b")
    lease.see(41)
    await look(lease, client)
    assert not lease.holds()
    await look(lease, client)
    assert lease.holds()
    assert lease.fence > 41
    assert lease.is_new_redis


async def test_one_that_hears_of_a_higher_number_gives_up_and_gets_a_higher_one(client: redis.asyncio.Redis) -> None:
    lease = Lease("a")
    await look(lease, client)
    lease.see(lease.fence)
    assert lease.holds()
    lease.see(99)
    assert not lease.holds()
    for _ in range(3):
        await look(lease, client)
    assert lease.holds()
    assert lease.fence > 99
