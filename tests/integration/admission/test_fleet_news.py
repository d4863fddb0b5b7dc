"""What the fleet knows between heartbeats: news of load and heads, and how it mends what it missed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis.asyncio
from msgspec.structs import replace

from gateway.registry.fleet import Fleet
from gateway.registry.records import LONGEST_BYTES, MOST_BYTES
from gateway.store.client import connect
from tests.integration.admission.test_fleet import running
from tests.support.pool import SECRET, beat, heartbeat, tell, vanish, write_heads
from tests.support.redis_server import RedisServer
from tests.support.waiting import until
from workers.protocol import keys
from workers.protocol.heartbeat import PROTOCOL_VERSION, Load
from workers.redis.long_commands import PoolCommands
from workers.redis.short_commands import Command

W1 = heartbeat("w1")
BUSY = Load(slots_busy=2, kv_tokens_used=900, backlog_tokens=70, free_in_ms=40.0)
HEADS = {1 << 61: 100, 2: 200, (1 << 64) - 3: 300}


def heads_of(fleet: Fleet, worker: str = "w1", model: str = "m") -> set[int]:
    """Of all that the tests use."""
    pool = fleet.pool(model)
    if worker not in pool.states:
        return set()
    number = pool.states[worker].number
    named = {head: pool.hashes.holders(head) for head in (*HEADS, *range(4, 200))}
    return {head for head, who in named.items() if who == number or (not isinstance(who, int) and number in who)}


@pytest.fixture
async def fleet(client: redis.asyncio.Redis) -> AsyncIterator[Fleet]:
    """With w1 in it; records are read once."""
    await beat(client, replace(W1, version=7), tell=False)
    await write_heads(client, W1, 7, HEADS)
    fleet = Fleet(client, SECRET, interval_s=30.0)
    await fleet.refresh()
    async with running(fleet):
        await asyncio.sleep(0.05)
        yield fleet


async def test_a_worker_has_the_heads_that_it_wrote(fleet: Fleet) -> None:
    assert heads_of(fleet) == set(HEADS)
    assert fleet.snapshot.of("m")[0].version == 7


@pytest.mark.serial
async def test_news_are_known_in_a_moment(client: redis.asyncio.Redis, fleet: Fleet) -> None:
    took_s = []
    for version in range(8, 15):
        load = replace(BUSY, waiting=version)
        told_at = time.monotonic()
        await tell(client, W1, version, load=load, added={version: 10}, dropped=(2,))
        took_s.append(await until(lambda load=load: fleet.snapshot.of("m")[0].load == load, 5.0, "heard"))  # type: ignore[misc]
        assert fleet.pool("m").states["w1"].heard_at < told_at + 0.1
    assert sorted(took_s)[3] < 0.5, took_s
    (known,) = fleet.snapshot.of("m")
    assert (known.version, known.slots_busy, known.kv_tokens_used) == (14, 2, 900)
    assert heads_of(fleet) == set(HEADS) - {2} | set(range(8, 15))


async def test_a_snapshot_that_someone_holds_stays_as_it_was(client: redis.asyncio.Redis, fleet: Fleet) -> None:
    before, pool = fleet.snapshot, fleet.pool("m")
    await tell(client, W1, 8, load=BUSY)
    await until(lambda: fleet.snapshot is not before, 2.0, "heard")
    assert before.of("m")[0].load == Load() == pool.states["w1"].beat.load
    assert fleet.pool("m") is not pool
    assert fleet.snapshot is fleet.snapshot
    assert fleet.pool("m") is fleet.pool("m")


async def test_draining_is_told_to_who_listens(client: redis.asyncio.Redis, fleet: Fleet) -> None:
    heard: list[bool] = []
    fleet.listen(lambda snapshot: heard.append(snapshot.of("m")[0].draining))
    await tell(client, W1, 8, load=BUSY)
    await tell(client, W1, 9, draining=True)
    await until(lambda: bool(heard), 2.0, "heard")
    assert heard == [True]
    assert fleet.pool("m").slots == 0


async def test_lost_news_are_mended_by_reading_all(client: redis.asyncio.Redis, fleet: Fleet) -> None:
    await beat(client, replace(W1, version=8, load=BUSY), tell=False)
    await write_heads(client, W1, 8, {2: 200, 50: 10})
    await tell(client, W1, 9, load=BUSY, added={51: 10})  # 8 was lost
    await until(lambda: heads_of(fleet) == {2, 50, 51}, 2.0, "mended")
    await tell(client, W1, 10, load=BUSY, added={52: 10})
    await until(lambda: heads_of(fleet) == {2, 50, 51, 52}, 2.0, "went on")


async def test_heads_that_were_written_before_are_brought_up_to_date(client: redis.asyncio.Redis, fleet: Fleet) -> None:
    """The heads in Redis are seconds old, and the record is not: what was told meanwhile is remembered."""
    for version in (8, 9):
        await tell(client, W1, version, added={version: 10}, dropped=(2,))
    await until(lambda: heads_of(fleet) == set(HEADS) - {2} | {8, 9}, 2.0, "heard")
    await beat(client, replace(W1, version=11), tell=False)
    await write_heads(client, W1, 8, {2: 200, 8: 10})
    await tell(client, W1, 11, added={11: 10})  # 10 was lost, and is in no heads yet
    await until(lambda: heads_of(fleet) >= {8, 11}, 2.0, "did what it could")
    await write_heads(client, W1, 10, {2: 200, 10: 10})
    await fleet.refresh()
    assert heads_of(fleet) == {2, 10, 11}


async def test_who_joins_late_has_what_was_told_before(client: redis.asyncio.Redis) -> None:
    """Heads are written more rarely than news; a gateway that starts knows both."""
    await beat(client, replace(W1, version=9), tell=False)
    await write_heads(client, W1, 7, HEADS)
    await tell(client, W1, 7, added={100: 10})
    await tell(client, W1, 8, added={101: 10})
    await tell(client, W1, 9, added={102: 10}, dropped=(2,))
    fleet = Fleet(client, SECRET)
    await fleet.refresh()
    assert heads_of(fleet) == set(HEADS) - {2} | {101, 102}


async def test_a_trimmed_stream_is_mended(client: redis.asyncio.Redis, fleet: Fleet) -> None:
    others = [replace(W1, worker=f"w{n}") for n in range(2, 5)]
    for other in others:
        await beat(client, other, tell=False)
    await fleet.refresh()
    await beat(client, replace(W1, version=20), tell=False)
    await write_heads(client, W1, 20, {120: 10})
    async with client.pipeline(transaction=True) as pipeline:  # at once: nobody reads between
        for version in range(8, 21):
            await tell(pipeline, W1, version, added={version: 10}, kept=2)
        for other in others:
            await tell(pipeline, other, 1, added={150: 10}, kept=2)
        await pipeline.execute()
    await fleet.refresh()
    assert heads_of(fleet, "w4") == heads_of(fleet, "w3") == {150}
    await tell(client, W1, 21, added={121: 10})
    await until(lambda: heads_of(fleet) == {120, 121}, 2.0, "mended")


async def test_the_last_entry_may_be_lost(client: redis.asyncio.Redis, fleet: Fleet) -> None:
    """Nothing comes after it that would show the gap: the record does."""
    await beat(client, replace(W1, version=8, load=BUSY), tell=False)
    await write_heads(client, W1, 8, {77: 10})
    await fleet.refresh()
    assert fleet.snapshot.of("m")[0].load == BUSY
    await fleet.refresh()
    assert heads_of(fleet) == {77}


async def test_a_restarted_worker_begins_anew(client: redis.asyncio.Redis, fleet: Fleet) -> None:
    again = replace(W1, boot="boot2")
    await tell(client, W1, 8, added={8: 10})
    await write_heads(client, again, 0, {})
    await beat(client, again)
    await tell(client, again, 1, load=BUSY, added={90: 10})
    await until(lambda: fleet.snapshot.of("m")[0].boot == "boot2", 2.0, "saw it")
    await write_heads(client, again, 1, {90: 10})
    await until(lambda: heads_of(fleet) == {90}, 2.0, "has its own heads only")
    await tell(client, W1, 9, added={9: 10})  # the old process says a last word
    await tell(client, again, 2, added={91: 10})
    await until(lambda: heads_of(fleet) == {90, 91}, 2.0, "goes on")


async def test_a_worker_that_only_news_tell_of_is_looked_up(client: redis.asyncio.Redis, fleet: Fleet) -> None:
    new = heartbeat("w9", model="other")
    await beat(client, replace(new, version=1), tell=False)
    await tell(client, new, 1, added={99: 10})
    await until(lambda: heads_of(fleet, "w9", "other") == {99}, 2.0, "looked up")
    assert "other" in fleet.snapshot.models
    gone = heartbeat("gone")
    await tell(client, gone, 1)
    await tell(client, replace(new, protocol=PROTOCOL_VERSION + 1, worker="odd"), 1)
    await client.xadd(keys.NEWS, {"n": b"\xc1 no news"})
    await tell(client, new, 2, added={98: 10})
    await until(lambda: heads_of(fleet, "w9", "other") == {98, 99}, 2.0, "went on")
    assert [worker.worker for worker in fleet.snapshot.of("m")] == ["w1"]


async def test_a_worker_that_is_gone_takes_its_heads_with_it(client: redis.asyncio.Redis, fleet: Fleet) -> None:
    await vanish(client, W1)
    await fleet.refresh()
    assert "w1" not in fleet.pool("m").states
    assert fleet.pool("m").hashes.holders(2) == ()
    await beat(client, W1)
    await until(lambda: len(fleet.snapshot.of("m")) == 1, 2.0, "is back")


@pytest.fixture
def fragile(server: RedisServer) -> Iterator[RedisServer]:
    with RedisServer(server.binary) as own:
        yield own


async def test_redis_comes_back_without_its_data(fragile: RedisServer) -> None:
    """The stream begins anew, and what was told while Redis was away is known from records and heads."""
    async with connect(fragile.url) as client, running(Fleet(client, SECRET)) as fleet:
        async with connect(fragile.url) as worker:
            await beat(worker, replace(W1, version=7))
            await write_heads(worker, W1, 7, HEADS)
            await until(lambda: heads_of(fleet) == set(HEADS), 2.0, "read")
            await tell(worker, W1, 8, added={8: 10})
            await until(lambda: 8 in heads_of(fleet), 2.0, "heard")
        fragile.kill()
        await asyncio.sleep(0.3)
        assert heads_of(fleet) == set(HEADS) | {8}
        fragile.start()
        async with connect(fragile.url) as worker:
            await beat(worker, replace(W1, version=12))
            await write_heads(worker, W1, 12, {60: 10})
            await until(lambda: heads_of(fleet) == {60}, 5.0, "read again")
            await tell(worker, W1, 13, added={61: 10})
            await until(lambda: heads_of(fleet) == {60, 61}, 2.0, "follows again")


async def test_entries_of_any_length_are_read_a_little_at_a_time(
    client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that has fallen may write to the stream, and gateways read all of it into one answer."""
    await beat(client, replace(W1, version=7), tell=False)
    await write_heads(client, W1, 7, HEADS)
    refused: list[str] = []
    fleet = Fleet(client, SECRET, refused=refused.append)
    await fleet.refresh()
    for length in (*[LONGEST_BYTES // 2] * 10, *[LONGEST_BYTES + 1] * 5):
        await client.xadd(keys.NEWS, {"n": bytes(length)})
    await tell(client, W1, 8, load=BUSY, added={4: 10})
    longest, ask = 0, PoolCommands.ask

    async def measured(line: PoolCommands, *commands: Command, timeout_s: float | None = None) -> list[Any]:
        nonlocal longest
        answers = await ask(line, *commands, timeout_s=timeout_s)
        if keys.NEWS in commands[0]:
            longest = max(longest, len(answers[0][1]))
        return answers

    monkeypatch.setattr(PoolCommands, "ask", measured)
    await fleet.refresh()
    assert 0 < longest <= MOST_BYTES + LONGEST_BYTES
    assert refused == ["news"] * 15
    assert heads_of(fleet) == {*HEADS, 4}
