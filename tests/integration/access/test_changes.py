"""Changes of records in Redis: each has a version above all earlier ones."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis.asyncio

from accounts.protocol.changes import MAX_CHANGES, Change, command, delete, offer, put
from accounts.protocol.records import AccessRecord, TeamRecord, digest, open_record, open_subject
from gateway.store.client import connect
from tests.support.redis_server import RedisServer, redis_binaries
from workers.protocol import keys
from workers.redis.link import run_command

SECRET = "of-gateways"
CI = AccessRecord(name="ci", sha256=digest("pk-ci"))
RED = TeamRecord(name="red", aliases=("small",))


@pytest.fixture(scope="module", params=redis_binaries(), ids=lambda path: path.parent.name)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    binary: Path = request.param
    with RedisServer(binary) as running:
        yield running


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect(server.url_of("gateway")) as connected:
        await connected.delete(keys.ACCESS_KEYS, keys.ACCESS_SUBJECTS, keys.ACCESS_CHANGES)
        yield connected


async def changed(client: redis.asyncio.Redis, *changes: Change) -> list[int]:
    answer: list[int] = await run_command(client, command(changes))
    return answer


async def versions(client: redis.asyncio.Redis) -> dict[str, float]:
    """Return member -> version, without the member that tells since when there are versions."""
    members = await run_command(client, ("ZRANGE", keys.ACCESS_CHANGES, 0, -1))
    found = {member.decode(): float(await client.zscore(keys.ACCESS_CHANGES, member) or 0) for member in members}
    begun, score = found.popitem()
    assert begun.startswith("begun:")
    assert score == float("inf")
    return found


async def test_each_change_has_a_version_above_all_earlier_ones(client: redis.asyncio.Redis) -> None:
    assert await changed(client, put(RED, SECRET), put(CI, SECRET)) == [1, 1]
    first = await versions(client)
    assert list(first) == ["team:red", "key:ci"]
    assert first["team:red"] < first["key:ci"]
    assert abs(first["key:ci"] / 1e6 - time.time()) < 60
    assert open_record(await client.hget(keys.ACCESS_KEYS, "ci") or b"", SECRET) == CI
    assert open_subject(await client.hget(keys.ACCESS_SUBJECTS, "team:red") or b"", SECRET) == RED
    assert await changed(client, delete("team:red"), delete("key:none")) == [1, 0]
    later = await versions(client)
    assert list(later) == ["key:ci", "team:red"]
    assert later["team:red"] > first["key:ci"]
    assert not await client.hexists(keys.ACCESS_SUBJECTS, "team:red")


async def test_what_is_so_already_is_no_change(client: redis.asyncio.Redis) -> None:
    assert await changed(client, put(CI, SECRET)) == [1]
    before = await versions(client)
    other = AccessRecord(name="ci", sha256=digest("pk-other"))
    assert await changed(client, put(CI, SECRET), offer(other, SECRET)) == [0, 0]
    assert await versions(client) == before
    assert await changed(client, put(other, SECRET)) == [1]
    assert await changed(client, delete("key:ci"), offer(CI, SECRET)) == [1, 1]


async def test_versions_grow_though_the_clock_goes_back(client: redis.asyncio.Redis) -> None:
    ahead = (time.time() + 3600) * 1e6 // 1
    await client.zadd(keys.ACCESS_CHANGES, {"key:ahead": ahead, "begun:1": float("inf")})
    assert await changed(client, put(CI, SECRET), put(RED, SECRET)) == [1, 1]
    assert await versions(client) == {"key:ahead": ahead, "key:ci": ahead + 1, "team:red": ahead + 2}


async def test_old_changes_are_dropped(client: redis.asyncio.Redis) -> None:
    old = (time.time() - 4000) * 1e6
    await client.zadd(keys.ACCESS_CHANGES, {f"key:{number}": old + number for number in range(150)})
    await changed(client, put(CI, SECRET))
    assert len(await versions(client)) == 51
    await changed(client, put(RED, SECRET))
    assert list(await versions(client)) == ["key:ci", "team:red"]


async def test_the_greatest_command_holds_redis_a_few_milliseconds(client: redis.asyncio.Redis) -> None:
    many = [AccessRecord(name=f"key{number}", sha256=digest(f"pk-{number}")) for number in range(MAX_CHANGES)]
    begun = time.perf_counter()
    assert sum(await changed(client, *(put(record, SECRET) for record in many))) == MAX_CHANGES
    assert time.perf_counter() - begun < 0.1
    with pytest.raises(ValueError, match="200"):
        command([delete("key:x")] * (MAX_CHANGES + 1))
