"""What a reading of the fleet takes where a worker's login has written any number of names and bytes, or news."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
import redis.asyncio

from gateway.registry.fleet import Fleet
from tests.integration.admission.test_fleet import running
from tests.support.pool import SECRET, beat, heartbeat, tell, vanish
from tests.support.waiting import until
from workers.protocol import keys
from workers.protocol.heartbeat import BEAT, MAX_HEADS, pack_heads

MIB = 1 << 20
NAMES = 100_000
LONGEST_TURN_S = 0.05
"""Of the event loop, in seconds of its thread's own time. It is held 5 ms, or for one entry of news."""


@asynccontextmanager
async def turns() -> AsyncIterator[list[float]]:
    """Yield a list of one number: the longest turn of the event loop within the block."""
    longest = [0.0]

    async def watch() -> None:
        while True:
            begun = time.thread_time()
            await asyncio.sleep(0)
            longest[0] = max(longest[0], time.thread_time() - begun)

    watching = asyncio.create_task(watch())
    gc.collect()
    gc.disable()  # a gateway's collector looks at what is new only (workers/heap.py)
    try:
        yield longest
    finally:
        gc.enable()
        watching.cancel()


@contextmanager
def memory_below(most: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def of_model(fleet: Fleet) -> list[str]:
    return [worker.worker for worker in fleet.snapshot.of("m")]


async def add_names(client: redis.asyncio.Redis, key: str) -> None:
    for first in range(0, NAMES, 10_000):
        await client.sadd(key, *(f"false{number}" for number in range(first, first + 10_000)))


async def test_false_records_are_read_a_few_at_a_time(
    client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(100):
        name = f"false{number}"
        await client.sadd(keys.workers("m"), name)
        await client.hset(keys.worker("m", name), BEAT, bytes(MIB - 1 if number % 2 else 4 * MIB))
    await beat(client, heartbeat("w1"))
    fleet = Fleet(client, SECRET)
    with memory_below(32 * MIB):
        await fleet.refresh()
        await fleet.refresh()
    await until_read(fleet, ["w1"])
    await client.delete(*(keys.worker("m", f"false{number}") for number in range(100)))
    told = [record.getMessage() for record in caplog.records]
    assert any(":false" in line and "bytes are too many" in line for line in told)
    assert any("some records" in line for line in told)


async def until_read(fleet: Fleet, workers: list[str], readings: int = 40) -> None:
    """A worker that is not known is not among the first each time."""
    for _ in range(readings):
        if of_model(fleet) == workers:
            return
        await fleet.refresh()
    assert of_model(fleet) == workers


async def test_heads_are_no_longer_than_a_worker_writes_them(
    client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    for worker in ("w1", "w2"):
        await beat(client, heartbeat(worker))
    await client.set(keys.worker_heads("m", "w1"), pack_heads(0, {1: 1}) + bytes(12 * MIB))
    full = {number << 8: 1 for number in range(MAX_HEADS)}
    await client.set(keys.worker_heads("m", "w2"), pack_heads(0, full))
    fleet = Fleet(client, SECRET)
    with memory_below(8 * MIB):
        await fleet.refresh()
    assert of_model(fleet) == ["w1", "w2"]
    pool = fleet.pool("m")
    assert pool.hashes.count(pool.states["w1"].number) == 0
    assert pool.hashes.count(pool.states["w2"].number) == MAX_HEADS
    assert any("bytes are too many" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("key", [keys.MODELS, keys.workers("m")])
async def test_names_without_number_are_read_some_at_a_time(
    client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    """Whoever is known stays known, and is seen to go; whoever comes is found, if not at once."""
    await beat(client, heartbeat("w1"))
    fleet = Fleet(client, SECRET, interval_s=0.1)
    await fleet.refresh()
    await add_names(client, key)
    async with turns() as longest, running(fleet):
        await beat(client, heartbeat("w2"), tell=False)
        await until(lambda: of_model(fleet) == ["w1", "w2"], 20.0, "found a worker that said nothing")
        await vanish(client, heartbeat("w1"))
        await until(lambda: of_model(fleet) == ["w2"], 5.0, "saw one go")
        await client.publish(keys.FLEET_CHANNEL, keys.worker("new", "w3"))
        await beat(client, heartbeat("w3", model="new"), tell=False)
        await client.publish(keys.FLEET_CHANNEL, keys.worker("new", "w3"))
        await until(lambda: bool(fleet.snapshot.of("new")), 5.0, "found one that said so")
    assert longest[0] < LONGEST_TURN_S
    assert len(fleet.snapshot.models) < NAMES // 4
    assert sum("too many to be read at once" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("key", [keys.MODELS, keys.workers("m")])
async def test_a_gateway_that_starts_among_names_without_number_finds_the_workers(
    client: redis.asyncio.Redis, key: str
) -> None:
    await beat(client, heartbeat("w1"))
    await add_names(client, key)
    fleet = Fleet(client, SECRET, interval_s=0.05)
    await fleet.refresh()
    assert fleet.snapshot.is_read == (key != keys.MODELS), "a name that is not found may be a model"
    async with running(fleet):
        await until(lambda: of_model(fleet) == ["w1"], 30.0, "found it")


async def test_sealed_news_leave_the_event_loop_to_others(client: redis.asyncio.Redis) -> None:
    """As many heads as there may be in each; whoever has the worker secret may tell as much."""
    record = heartbeat("w1")
    await beat(client, record)
    fleet = Fleet(client, SECRET)
    await fleet.refresh()
    before: tuple[int, ...] = ()
    for version in range(1, 41):
        added = {(version << 48) + (number << 20): 1 << 20 for number in range(MAX_HEADS)}
        await tell(client, record, version, added=added, dropped=before)
        before = tuple(added)
    async with turns() as longest:
        await fleet.refresh()
    assert fleet.snapshot.of("m")[0].version == 40
    pool = fleet.pool("m")
    assert pool.hashes.count(pool.states["w1"].number) == MAX_HEADS
    assert longest[0] < LONGEST_TURN_S


async def test_news_add_no_more_heads_than_a_worker_may_have(client: redis.asyncio.Redis) -> None:
    record = heartbeat("w1")
    await beat(client, record)
    fleet = Fleet(client, SECRET)
    await fleet.refresh()
    for version in range(1, 11):
        await tell(client, record, version, added={(version << 48) + number: 1 for number in range(MAX_HEADS)})
    await fleet.refresh()
    pool = fleet.pool("m")
    assert pool.hashes.count(pool.states["w1"].number) <= MAX_HEADS


async def test_news_of_workers_that_are_none_are_kept_for_few(client: redis.asyncio.Redis) -> None:
    await beat(client, heartbeat("w1"))
    fleet = Fleet(client, SECRET)
    await fleet.refresh()
    heads = {(1 << 40) + number: 1 << 20 for number in range(MAX_HEADS)}
    for number in range(120):
        await tell(client, heartbeat(f"false{number}"), 1, added=heads)
    await fleet._read_news()
    assert sum(len(news) for news in fleet._state._recent_news.values()) <= 128
    await fleet.refresh()
    assert of_model(fleet) == ["w1"]
    assert not fleet._state._recent_news


async def test_announcements_without_pause_are_not_followed_without_pause(client: redis.asyncio.Redis) -> None:
    for number in range(300):
        await beat(client, heartbeat(f"w{number}"), tell=False)
    fleet = Fleet(client, SECRET)
    await fleet.refresh()
    readings, models = 0, fleet._records.models

    async def counted() -> object:
        nonlocal readings
        readings += 1
        return await models()

    fleet._records.models = counted  # type: ignore[method-assign,assignment]
    async with running(fleet):
        ends_at = time.monotonic() + 1.0
        while time.monotonic() < ends_at:
            await client.publish(keys.FLEET_CHANNEL, "something")
    assert 0 < readings < 15
