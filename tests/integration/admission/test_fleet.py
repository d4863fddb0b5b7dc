"""The snapshot of the fleet: who is in it, when it changes, and what it does without Redis."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import redis.asyncio

from gateway.catalog.names import ModelNames
from gateway.registry.fleet import PATIENCE_S, Fleet, FleetSnapshot
from gateway.registry.records import Names, RecordReader
from gateway.store.client import connect
from tests.support.pool import ANYONE, SECRET, beat, drain, heartbeat, vanish
from tests.support.redis_server import RedisServer
from tests.support.waiting import until
from workers.protocol import keys
from workers.protocol.heartbeat import (
    FIELD,
    PROTOCOL_VERSION,
    Load,
    News,
    encode_heartbeat,
    encode_news,
    record_of,
    sealed_news,
)


@asynccontextmanager
async def running(fleet: Fleet) -> AsyncIterator[Fleet]:
    task = asyncio.create_task(fleet.run())
    try:
        yield fleet
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_snapshot_has_every_live_worker_by_model(client: redis.asyncio.Redis) -> None:
    fleet = Fleet(client, SECRET)
    assert await fleet.refresh() == FleetSnapshot()
    for record in (heartbeat("w2"), heartbeat("w1"), heartbeat("w3", model="Qwen/0.5B:q8@x", draining=True)):
        await beat(client, record)
    gone = heartbeat("w4", model="gone")
    await beat(client, gone)
    await vanish(client, gone)
    snapshot = await fleet.refresh()
    assert snapshot is fleet.snapshot
    assert snapshot.models == {"m", "Qwen/0.5B:q8@x", "gone"}
    assert [worker.worker for worker in snapshot.of("m")] == ["w1", "w2"]
    assert [worker.draining for worker in snapshot.of("Qwen/0.5B:q8@x")] == [True]
    assert snapshot.of("gone") == snapshot.of("never") == ()
    assert set(snapshot.workers) == {"m", "Qwen/0.5B:q8@x"}


async def test_strangers_are_left_out_and_named_once(
    client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    await beat(client, heartbeat("w1"))
    await beat(client, msgspec.structs.replace(heartbeat("newer"), protocol=PROTOCOL_VERSION + 1))
    await beat(client, heartbeat("odd"))
    await client.hset(keys.worker("m", "odd"), "beat", b'{"worker":"odd","slots":"many"}')
    await beat(client, heartbeat("garbage"))
    await client.hset(keys.worker("m", "garbage"), "beat", b"\xff")
    fleet = Fleet(client, SECRET)
    for _ in range(3):
        assert [worker.worker for worker in (await fleet.refresh()).of("m")] == ["w1"]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert sum(f"worker newer is left out: it speaks protocol {PROTOCOL_VERSION + 1}" in line for line in lines) == 1
    await client.delete(keys.worker("m", "odd"), keys.worker("m", "garbage"), keys.worker("m", "newer"))


async def test_records_that_no_holder_of_the_secret_wrote_for_their_place_are_left_out(
    client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    true, refused = heartbeat("w1"), Counter[str]()
    fleet = Fleet(client, SECRET, refused=lambda kind: refused.update([kind]))
    await beat(client, true)
    # One's own words, a true record with another address, and a true one in another place.
    forged = heartbeat("forged")
    await beat(client, forged)
    await client.hset(keys.worker("m", "forged"), mapping=record_of(forged, "guessed"))
    await beat(client, heartbeat("moved"))
    moved = encode_heartbeat(msgspec.structs.replace(heartbeat("moved"), address="http://elsewhere:1"))
    await client.hset(keys.worker("m", "moved"), "beat", moved)
    await beat(client, heartbeat("bare"))
    await client.hdel(keys.worker("m", "bare"), "seal")
    await beat(client, heartbeat("copied", model="large"))
    await client.hset(keys.worker("large", "copied"), mapping=record_of(true, SECRET))
    for _ in range(2):
        snapshot = await fleet.refresh()
        assert [worker.address for worker in snapshot.of("m")] == ["http://w1:1"]
        assert snapshot.of("large") == ()
    told = [record.getMessage() for record in caplog.records if "not sealed" in record.getMessage()]
    assert len(told) == 4
    assert all("PADDOCK_WORKER_SECRET" in line for line in told)
    assert refused["record"] >= 8


async def test_news_that_no_holder_of_the_secret_told_change_nothing(client: redis.asyncio.Redis) -> None:
    """Else whoever may write there takes every worker out of service, or draws all calls to one."""
    record, refused = heartbeat("w1"), Counter[str]()
    fleet = Fleet(client, SECRET, refused=lambda kind: refused.update([kind]))
    await beat(client, record)
    await fleet.refresh()
    drains = News(model="m", worker="w1", boot=record.boot, version=1, load=Load(), draining=True)
    for value in (sealed_news(drains, "guessed"), encode_news(drains), b"", sealed_news(drains, SECRET)[:-1]):
        await client.xadd(keys.NEWS, {FIELD: value})
    await fleet.refresh()
    assert not fleet.snapshot.of("m")[0].draining
    assert refused["news"] == 4
    await client.xadd(keys.NEWS, {FIELD: sealed_news(drains, SECRET)})
    assert (await fleet.refresh()).of("m")[0].draining, "the worker's own word counts"


async def test_listeners_hear_of_changes_of_who_is_there_only(client: redis.asyncio.Redis) -> None:
    heard: list[FleetSnapshot] = []
    fleet = Fleet(client, SECRET, heard.append)
    fleet.listen(heard.append)
    record = heartbeat("w1")
    changes = [
        (record, True),
        (msgspec.structs.replace(record, slots_busy=2, kv_tokens_used=99), False),
        (msgspec.structs.replace(record, draining=True), True),
        (msgspec.structs.replace(record, boot="boot2"), True),
        (msgspec.structs.replace(record, boot="boot2", slots=4), True),
        (msgspec.structs.replace(record, boot="boot2", slots=4, address="http://elsewhere:1"), True),
    ]
    for changed, told in changes:
        heard.clear()
        await beat(client, changed)
        snapshot = await fleet.refresh()
        assert snapshot.of("m") == (changed,)
        assert heard == ([snapshot, snapshot] if told else [])
    heard.clear()
    await vanish(client, record)
    await fleet.refresh()
    assert heard == [fleet.snapshot, fleet.snapshot]


async def test_news_are_followed_at_once_and_silence_is_polled(client: redis.asyncio.Redis) -> None:
    hurried, patient = Fleet(client, SECRET, interval_s=30.0), Fleet(client, SECRET, interval_s=0.1)
    async with running(hurried), running(patient):
        await asyncio.sleep(0.1)
        record = heartbeat("w1")
        await beat(client, record)
        await until(lambda: len(hurried.snapshot.of("m")) == 1, 2.0, "told of a new worker")
        await drain(client, record)
        await until(lambda: hurried.snapshot.of("m")[0].draining, 2.0, "told of a draining worker")
        await vanish(client, record)
        await until(lambda: not patient.snapshot.of("m"), 2.0, "saw a worker go that said nothing")
        assert hurried.snapshot.of("m")


@pytest.fixture
def fragile(server: RedisServer) -> Iterator[RedisServer]:
    with RedisServer(server.binary) as own:
        yield own


@pytest.mark.serial  # the snapshot is kept for a second, which may pass unseen beside other tests
async def test_a_redis_that_comes_back_empty_is_given_time(fragile: RedisServer) -> None:
    """Until the workers have beaten again, calls for their models are not told that there is no such model."""
    async with connect(fragile.url) as client, running(Fleet(client, SECRET, interval_s=0.05)) as fleet:
        for worker in ("w1", "w2"):
            await beat(client, heartbeat(worker))
        await until(lambda: len(fleet.snapshot.of("m")) == 2, 2.0, "saw the workers")
        fragile.kill()
        fragile.start()
        async with connect(fragile.url) as other:
            await asyncio.sleep(0.3)
            assert len(fleet.snapshot.of("m")) == 2
            await beat(other, heartbeat("w1"))
            await asyncio.sleep(0.3)
            assert [w.worker for w in fleet.snapshot.of("m")] == ["w1", "w2"]
            await until(lambda: [w.worker for w in fleet.snapshot.of("m")] == ["w1"], 3.0, "the other one is gone")


async def test_a_redis_that_loses_its_data_within_a_reading_is_given_time(
    client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the list of models and the records of their workers."""
    fleet, list_models = Fleet(client, SECRET), RecordReader.models
    await beat(client, heartbeat("w1"))
    await fleet.refresh()

    async def list_and_lose(reader: RecordReader) -> Names | None:
        names = await list_models(reader)
        await client.flushall()
        return names

    with monkeypatch.context() as patched:
        patched.setattr(RecordReader, "models", list_and_lose)
        assert len((await fleet.refresh()).of("m")) == 1
    assert len((await fleet.refresh()).of("m")) == 1
    await asyncio.sleep(PATIENCE_S)
    assert not (await fleet.refresh()).of("m")


async def test_the_last_snapshot_outlives_redis(fragile: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with connect(fragile.url) as client, running(Fleet(client, SECRET, interval_s=0.05)) as fleet:
        await beat(client, heartbeat("w1"))
        await until(lambda: len(fleet.snapshot.of("m")) == 1, 2.0, "saw the worker")
        fragile.kill()
        await asyncio.sleep(0.4)
        assert len(fleet.snapshot.of("m")) == 1
        with pytest.raises(redis.asyncio.RedisError):
            await fleet.refresh()
        fragile.start()
        async with connect(fragile.url) as other:  # a client that has failed waits before it tries again
            await beat(other, heartbeat("w2"))
        await until(lambda: [w.worker for w in fleet.snapshot.of("m")] == ["w2"], 2.0, "saw the new fleet")
        await until(lambda: "can be read again" in caplog.text, 2.0, "said so")
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "can't be read (" in line]) == 1
    assert len([line for line in lines if "can be read again" in line]) == 1


async def test_a_model_that_redis_has_lost_is_unavailable_and_not_unknown(client: redis.asyncio.Redis) -> None:
    adapted = msgspec.structs.replace(heartbeat("w1", model="lost"), adapters=("story",))
    async with running(Fleet(client, SECRET, interval_s=0.05)) as fleet:
        await beat(client, adapted)
        await beat(client, heartbeat("w2", model="kept"))
        await until(lambda: fleet.snapshot.workers.keys() == {"kept", "lost"}, 2.0, "saw the workers")
        await client.flushall()
        await beat(client, heartbeat("w2", model="kept"))
        await until(lambda: not fleet.snapshot.of("lost"), 3.0, "saw that it is gone")
        assert fleet.snapshot.models == {"kept", "lost"}
        assert fleet.snapshot.adapters == {"story": "lost"}
        assert ModelNames(None).resolve("lost", ANYONE, fleet.snapshot.models) == "lost"


async def test_workers_whose_writing_redis_refuses_are_kept(client: redis.asyncio.Redis) -> None:
    refused = {"m"}
    fleet = Fleet(client, SECRET, interval_s=0.05)
    fleet.keep_unless(lambda model: model not in refused)
    async with running(fleet):
        await beat(client, heartbeat("w1"), ttl_s=0.3)
        await beat(client, heartbeat("w1", model="other"), ttl_s=0.3)
        await until(lambda: fleet.snapshot.workers.keys() == {"m", "other"}, 2.0, "saw the workers")
        await until(lambda: fleet.snapshot.workers.keys() == {"m"}, 2.0, "one expired")
        await asyncio.sleep(0.3)
        assert fleet.snapshot.workers.keys() == {"m"}
        refused.clear()
        assert await until(lambda: not fleet.snapshot.workers, 3.0, "gone") > 0.3
