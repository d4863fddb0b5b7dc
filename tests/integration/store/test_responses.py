"""Stored responses and stream logs against a real Redis: bounds, lifetimes, and what is written twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio

from accounts.protocol.records import NO_TEAM_LIMITS, TeamLimits
from gateway.errors import StoreUnavailable
from gateway.resume.recording import Recording
from gateway.store.client import connect
from gateway.store.responses import ResponseRecords
from gateway.store.streams import Batch, RenewedStreams, StreamInfo, StreamLog, Write
from tests.support.team_limits import unlimited
from workers.protocol import keys

HEAD = StreamInfo("blue", "digest", "gw")


@pytest.fixture
async def store(client: redis.asyncio.Redis) -> AsyncIterator[ResponseRecords]:
    made = ResponseRecords(client, 60.0, 100, unlimited)
    yield made
    await made.close()


@pytest.fixture
def log(client: redis.asyncio.Redis) -> StreamLog:
    return StreamLog(client, kept_s=60.0)


async def held(client: redis.asyncio.Redis, team: str) -> int:
    """Bytes of a team's responses, as they are counted; checks that the count is true."""
    ids = [str(id_, "utf-8") for id_ in await client.zrange(keys.responses(team), 0, -1) if isinstance(id_, bytes)]
    counted = await client.hgetall(keys.response_sizes(team))
    sizes = {str(name, "utf-8"): int(size) for name, size in counted.items() if isinstance(name, bytes)}
    total = sizes.pop("all", 0)
    lengths = {id_: int(await client.strlen(keys.response(team, id_))) for id_ in ids}
    assert sizes == lengths
    assert total == sum(lengths.values())
    return total


async def test_kept_found_and_dropped(client: redis.asyncio.Redis, store: ResponseRecords) -> None:
    assert await store.keep("blue", "a", b"one")
    assert await store.keep("blue", "b", b"two")
    assert await store.find("blue", ["b", "x", "a"]) == [b"two", None, b"one"]
    assert await store.find("green", ["a"]) == [None]
    assert await store.find("blue", []) == []
    assert not await store.drop("green", "a")
    assert await store.drop("blue", "a")
    assert not await store.drop("blue", "a")
    assert await store.find("blue", ["a", "b"]) == [None, b"two"]
    assert await held(client, "blue") == 3


async def test_a_full_redis_takes_no_more_and_loses_nothing(
    client: redis.asyncio.Redis, store: ResponseRecords
) -> None:
    """Let through, responses would grow past `maxmemory` until the machine kills Redis with everything else in it."""
    assert await store.keep("blue", "a", b"one")
    used = int((await client.info("memory"))["used_memory"])
    await client.config_set("maxmemory", used // 2)
    try:
        with pytest.raises(StoreUnavailable):
            await store.keep("blue", "b", b"two")
        assert await store.find("blue", ["a", "b"]) == [b"one", None]
        assert await store.keep("blue", "a", b"won", again=True), "one that is there may end"
        assert await held(client, "blue") == 3
        assert await store.drop("blue", "a")
    finally:
        await client.config_set("maxmemory", 0)
    assert await store.keep("blue", "b", b"two")
    assert await held(client, "blue") == 3


async def test_the_oldest_make_room(client: redis.asyncio.Redis, store: ResponseRecords) -> None:
    for name in "abcd":
        assert await store.keep("blue", name, name.encode() * 30)
        await asyncio.sleep(0.002)
    assert await store.find("blue", ["a", "b"]) == [None, b"b" * 30]
    assert await held(client, "blue") == 90
    assert await store.keep("blue", "b", b"B" * 40)
    assert await held(client, "blue") == 100
    assert not await store.keep("blue", "e", b"e" * 101)
    assert await held(client, "blue") == 100
    assert await store.keep("green", "a", b"x" * 100)


async def test_many_short_ones_make_room_for_a_long_one_in_many_short_runs(client: redis.asyncio.Redis) -> None:
    """In a single one they held every other caller of Redis up, for most of a second where there were thousands."""
    store = ResponseRecords(client, 60.0, 30_000, unlimited)
    for number in range(300):
        assert await store.keep("blue", f"s{number}", b"x" * 100)
    await asyncio.sleep(0.002)
    assert await store.keep("blue", "kept", b"y" * 100, ["s299"])
    runs = await _num_runs(client)
    assert await store.keep("blue", "long", b"z" * 29_800, ["kept"])
    assert 4 <= await _num_runs(client) - runs <= 6
    assert await held(client, "blue") == 30_000
    assert await store.find("blue", ["kept", "long", "s298"]) == [b"y" * 100, b"z" * 29_800, None]
    assert await store.keep("blue", "kept", b"Y" * 200, again=True)
    assert await held(client, "blue") == 30_000
    assert await store.keep("blue", "kept", b"Y" * 300, again=True), "in its own place, and the other makes room"
    assert await held(client, "blue") == 300
    await store.close()


async def _num_runs(client: redis.asyncio.Redis) -> int:
    stats: Any = await client.info("commandstats")
    return int(stats.get("cmdstat_evalsha", {}).get("calls", 0))


async def test_a_team_s_own_limits_replace_the_setting(client: redis.asyncio.Redis) -> None:
    limits: dict[str, TeamLimits] = {}
    store = ResponseRecords(client, 60.0, 100, lambda team: limits.get(team, NO_TEAM_LIMITS))

    async def kept(number: int, num_bytes: int = 30) -> int:
        """Store more responses; return the bytes that the team then has."""
        for _ in range(number):
            assert await store.keep("blue", f"r{next(names)}", b"x" * num_bytes)
            await asyncio.sleep(0.002)
        return await held(client, "blue")

    names = iter(range(10_000))
    assert await kept(5) == 90
    limits["blue"] = TeamLimits(stored_response_bytes=60)
    assert await kept(1) == 60
    assert not await store.keep("blue", "long", b"x" * 61)
    limits["blue"] = TeamLimits(stored_response_bytes=200)
    assert await kept(6) == 180
    limits["blue"] = TeamLimits(stored_response_bytes=0)
    assert not await store.keep("blue", "short", b"x")
    limits["green"] = TeamLimits(stored_response_bytes=10)
    limits.pop("blue")
    assert await kept(1) == 90
    assert not await store.keep("green", "a", b"x" * 11)
    await store.close()


async def test_a_team_has_so_many_responses(client: redis.asyncio.Redis) -> None:
    limits = TeamLimits(stored_responses=3)
    store = ResponseRecords(client, 60.0, 1 << 20, lambda team: limits)

    async def stored() -> list[str]:
        return [
            str(id_, "utf-8") for id_ in await client.zrange(keys.responses("blue"), 0, -1) if isinstance(id_, bytes)
        ]

    for name in "abcd":
        assert await store.keep("blue", name, b"x")
        await asyncio.sleep(0.002)
    assert await stored() == ["b", "c", "d"]
    assert await store.keep("blue", "c", b"again", again=True), "in its own place"
    assert sorted(await stored()) == ["b", "c", "d"]
    limits = TeamLimits()
    for number in range(297):
        assert await store.keep("blue", f"s{number}", b"x")
    assert len(await stored()) == 300
    await asyncio.sleep(0.002)
    limits = TeamLimits(stored_responses=1)
    runs = await _num_runs(client)
    assert await store.keep("blue", "last", b"x")
    assert 4 <= await _num_runs(client) - runs <= 6, "in short runs"
    assert await stored() == ["last"]
    assert await held(client, "blue") == 1
    await store.close()


async def test_those_that_a_response_follows_live_as_long(client: redis.asyncio.Redis, store: ResponseRecords) -> None:
    await store.keep("blue", "a", b"a" * 30)
    await asyncio.sleep(0.002)
    await store.keep("blue", "b", b"b" * 30)
    await asyncio.sleep(0.002)
    await client.pexpire(keys.response("blue", "a"), 1000)
    await store.keep("blue", "c", b"c" * 30, ["a"])
    assert await client.pttl(keys.response("blue", "a")) > 50_000
    await asyncio.sleep(0.002)
    await store.keep("blue", "d", b"d" * 30, ["c", "a"])
    assert await store.find("blue", ["a", "b"]) == [b"a" * 30, None]
    assert await held(client, "blue") == 90


async def test_what_is_over_is_counted_no_more(client: redis.asyncio.Redis) -> None:
    store = ResponseRecords(client, 0.03, 100, unlimited)
    await store.keep("blue", "a", b"a" * 60)
    await asyncio.sleep(0.05)
    assert await store.find("blue", ["a"]) == [None]
    await store.keep("blue", "b", b"b" * 60)
    assert await held(client, "blue") == 60
    await asyncio.sleep(0.05)
    assert not await client.keys("pd:*")
    await store.close()


async def test_what_is_over_is_cleared_away_in_parts(client: redis.asyncio.Redis) -> None:
    store = ResponseRecords(client, 60.0, 1 << 20, unlimited)
    names = [f"r{n}" for n in range(1200)]
    await asyncio.gather(*(store.keep("blue", name, b"x") for name in names))
    await client.zadd(keys.responses("blue"), dict.fromkeys(names, 1.0))  # their time was over long ago
    left = []
    for name in "abc":
        assert await store.keep("blue", name, b"x")
        left.append(await client.zcard(keys.responses("blue")))
    await store.close()
    assert left == [1200 + 1 - 500, 1200 + 2 - 1000, 3]
    assert await held(client, "blue") == 3


async def test_in_place_of_one_that_is_there(client: redis.asyncio.Redis, store: ResponseRecords) -> None:
    assert not await store.keep("blue", "a", b"new", again=True)
    await store.keep("blue", "a", b"old")
    assert await store.keep("blue", "a", b"newer", again=True)
    assert await store.find("blue", ["a"]) == [b"newer"]
    assert await held(client, "blue") == 5


async def test_a_redis_that_is_away() -> None:
    async with connect("unix:///nowhere.sock") as nowhere:
        store, log = ResponseRecords(nowhere, 60.0, 100, unlimited), StreamLog(nowhere, 60.0)
        for asking in (store.keep("t", "a", b""), store.find("t", ["a"]), log.head("s"), log.read("s", 0, 64)):
            with pytest.raises(StoreUnavailable):
                await asking
        await store.close()


def write(first: int, last: int, keep_from: int = 1, ended: bool = False) -> Write:
    events = b"".join(b"data: %d\n\n" % n for n in range(first, last + 1))
    return Write("s", HEAD, Batch(first, last, events), keep_from, ended, last, is_first=first == keep_from)


NOTHING = RenewedStreams(frozenset(), frozenset())
UNWANTED = RenewedStreams(frozenset({"s"}), frozenset())


async def test_a_log_is_read_from_anywhere(log: StreamLog) -> None:
    assert await log.head("s") is None
    assert await log.write([write(1, 3), write(4, 4), write(5, 9)]) == NOTHING
    assert await log.head("s") == HEAD
    assert [(batch.first, batch.last) for batch in (await log.read("s", 0, 64)).batches] == [(1, 3), (4, 4), (5, 9)]
    assert [batch.first for batch in (await log.read("s", 2, 64)).batches] == [1, 4, 5]
    assert [batch.first for batch in (await log.read("s", 3, 64)).batches] == [4, 5]
    page = await log.read("s", 9, 64)
    assert (page.batches, page.ended) == ((), False)
    await log.write([Write("s", HEAD, None, 1, True, 9)])
    assert (await log.read("s", 9, 64)).ended
    assert (await log.read("s", 6, 64)).ended


async def test_writing_twice_changes_nothing(log: StreamLog) -> None:
    for _ in range(2):
        await log.write([write(1, 3, ended=True)])
    page = await log.read("s", 0, 64)
    assert ([batch.body.count(b"data") for batch in page.batches], page.ended) == ([3], True)


async def test_what_is_too_old_is_cut_off(log: StreamLog) -> None:
    await log.write([write(1, 3), write(4, 6), write(7, 9, keep_from=5)])
    assert [batch.first for batch in (await log.read("s", 0, 64)).batches] == [4, 7]


async def test_a_stream_lives_as_long_as_its_gateway(client: redis.asyncio.Redis) -> None:
    log = StreamLog(client, kept_s=60.0, running_s=0.05)
    await log.write([write(1, 3)])
    await asyncio.sleep(0.08)
    assert await log.head("s") is None
    await log.write([write(1, 3, ended=True)])
    await asyncio.sleep(0.08)
    assert await log.head("s") == HEAD


async def test_what_is_new_alone_renews_nothing(client: redis.asyncio.Redis, log: StreamLog) -> None:
    await log.write([write(1, 1)])
    await log.ask_to_end("s")
    await client.pexpire(keys.stream_log("s"), 5000)
    assert await log.write([replace(write(2, 2), renew=False)]) == NOTHING
    assert await client.pttl(keys.stream_log("s")) <= 5000
    assert [batch.first for batch in (await log.read("s", 0, 64)).batches] == [1, 2]
    assert await log.write([write(3, 3)]) == UNWANTED
    assert await client.pttl(keys.stream_log("s")) > 5000


async def test_what_redis_lost_of_a_stream_is_told_and_written_anew(
    client: redis.asyncio.Redis, log: StreamLog
) -> None:
    await log.write([write(1, 3)])
    await client.flushall()
    await log.write([replace(write(4, 6), renew=False)])
    assert (await log.write([write(7, 9)])).lost == {"s"}
    assert await log.write([write(1, 9, ended=True)]) == NOTHING
    assert [(batch.first, batch.last) for batch in (await log.read("s", 0, 64)).batches] == [(1, 9)]


async def test_a_recording_is_renewed_when_it_begins_when_it_ends_and_when_it_is_time() -> None:
    recording = Recording("s", HEAD, 1000)

    async def pending_write(*, renew: bool = False) -> bool:
        recording.write(b"data: x\n\n")
        told = recording.pending_write(renew=renew)
        assert told is not None
        recording.mark_written(told)
        return told.renew

    assert [await pending_write(), await pending_write(), await pending_write(renew=True), await pending_write()] == [
        True,
        False,
        True,
        False,
    ]
    recording.end()
    assert await pending_write()


async def test_readers_and_the_end_are_told(client: redis.asyncio.Redis, log: StreamLog) -> None:
    await log.write([write(1, 1)])
    before = await log.signs("s")
    await log.sign("s")
    assert await log.signs("s") != before
    assert await log.write([write(2, 2)]) == NOTHING
    await log.ask_to_end("s")
    assert await log.write([Write("s", HEAD, None, 1, False, 2)]) == UNWANTED
    await log.forget(["s"])
    assert not await client.keys("pd:stream:*")
    await log.ask_to_end("s")
    assert await client.pttl(keys.stream("s")) > 0
