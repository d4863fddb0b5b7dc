"""Redis as the mirror of the database: repaired whatever it loses, and followed by every service of one database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import redis.asyncio

from accounts.access.changes import Changes, PublishedLater
from accounts.access.keys import Keys
from accounts.access.rights import system
from accounts.protocol.changes import Change, command, delete, put
from accounts.protocol.records import AccessRecord, digest, first_record, open_record, seal_record
from tests.support.admin_api import SECRET, AdminApi, serving, wait_until_ready
from tests.support.databases import Backend, Databases
from tests.support.redis_server import RedisServer
from workers.protocol import keys
from workers.redis.link import connect, long_commands_of


@pytest.fixture
def url(databases: Databases, backend: Backend, tmp_path: Path) -> str:
    return databases.url(backend, tmp_path)


@pytest.fixture
async def own_redis() -> AsyncIterator[RedisServer]:
    """A Redis that the test may kill."""
    with RedisServer() as running:
        yield running


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 10.0) -> float:
    """Wait until the condition holds, and return how long that took."""
    began = time.monotonic()
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110 - another process's doing
            await asyncio.sleep(0.02)
    return time.monotonic() - began


async def names(mirror: redis.asyncio.Redis) -> set[str]:
    return {text(name) for name in await mirror.hkeys(keys.ACCESS_KEYS)}


def text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


async def publish(mirror: redis.asyncio.Redis, *changes: Change) -> None:
    """Write to Redis as gateways and earlier versions do, past the service."""
    await long_commands_of(mirror).ask(command(changes))


async def test_redis_that_lost_everything_has_it_back(api: AdminApi, mirror: redis.asyncio.Redis) -> None:
    for number in range(3):
        await api.post("/admin/keys", {"name": f"k{number}"})
    before = await mirror.hgetall(keys.ACCESS_KEYS), await mirror.hgetall(keys.ACCESS_SUBJECTS)
    await mirror.flushall()
    took_s = await until(lambda: is_as_before(mirror, before))
    assert took_s < 5


async def is_as_before(mirror: redis.asyncio.Redis, before: tuple[object, object]) -> bool:
    return before == (await mirror.hgetall(keys.ACCESS_KEYS), await mirror.hgetall(keys.ACCESS_SUBJECTS))


async def test_redis_restored_from_a_backup_gets_what_came_later(api: AdminApi, mirror: redis.asyncio.Redis) -> None:
    for name in ("kept", "deleted"):
        await api.post("/admin/keys", {"name": name})
    backup = {text(name): await mirror.dump(name) or b"" for name in await mirror.keys()}
    await api.delete("/admin/keys/deleted")
    await api.post("/admin/keys/kept/block")
    await api.post("/admin/keys", {"name": "later"})
    await mirror.flushall()
    for name, stored in sorted(backup.items(), key=lambda item: item[0] == keys.ACCESS_POSITION):
        await mirror.restore(name, 0, stored)
    await until(lambda: has_names(mirror, {"kept", "later"}))
    value = await mirror.hget(keys.ACCESS_KEYS, "kept")
    assert value is not None
    assert open_record(value, SECRET).blocked


async def has_names(mirror: redis.asyncio.Redis, wanted: set[str]) -> bool:
    return await names(mirror) == wanted


async def test_a_change_that_its_service_did_not_publish_is_published_within_a_second(
    api: AdminApi, mirror: redis.asyncio.Redis
) -> None:
    """As of a service that was killed between the commit and publishing, or of another one."""
    other = Keys(Changes(api.accounts.database, PublishedLater()), SECRET)
    await asyncio.to_thread(other.mint, system("another"), {"name": "ci"})
    assert await until(lambda: has_names(mirror, {"ci"})) < 1.0
    await asyncio.to_thread(other.delete, system("another"), "ci")
    assert await until(lambda: has_names(mirror, set())) < 1.0


async def test_services_of_one_database_undo_nothing_of_each_other(
    url: str, redis_server: RedisServer, mirror: redis.asyncio.Redis, tmp_path: Path
) -> None:
    where = redis_server.url_of("gateway")
    async with serving(url, where, tmp_path) as one, serving(url, where, tmp_path) as two:
        await wait_until_ready(one)
        await wait_until_ready(two)
        await one.post("/admin/keys", {"name": "ci"})
        for weight in range(1, 30):
            changed = await (one, two)[weight % 2].patch("/admin/keys/ci", {"weight": weight})
            assert changed["published"]
            value = await mirror.hget(keys.ACCESS_KEYS, "ci")
            assert value is not None
            assert open_record(value, SECRET).weight == weight


async def test_many_changes_at_once_are_all_made(api: AdminApi, mirror: redis.asyncio.Redis) -> None:
    await asyncio.gather(*(api.post("/admin/keys", {"name": f"k{number}"}) for number in range(20)))
    await until(lambda: has_names(mirror, {f"k{number}" for number in range(20)}))
    assert (await api.get("/admin/audit/verify"))["is_whole"]


async def test_with_redis_away_changes_are_made_and_published_later(
    url: str, own_redis: RedisServer, tmp_path: Path
) -> None:
    async with serving(url, own_redis.url_of("gateway"), tmp_path) as api:
        await wait_until_ready(api)
        await api.post("/admin/keys", {"name": "early"})
        own_redis.kill()
        began = time.monotonic()
        made = await api.post("/admin/keys", {"name": "ci"})
        assert made["published"] is False
        assert time.monotonic() - began < 4
        began = time.monotonic()
        assert (await api.post("/admin/keys/early/block"))["published"] is False
        assert time.monotonic() - began < 1, "the second change waits for a Redis that is known to be away"
        own_redis.start()
        async with connect(own_redis.url, timeout_s=5, retries=0) as mirror:
            await until(lambda: has_names(mirror, {"early", "ci"}), 20)
            for done in ("unblock", "block", "unblock"):  # names can be there before the service has heard of it
                if (await api.post(f"/admin/keys/early/{done}"))["published"]:
                    break
                await asyncio.sleep(1)
            else:
                pytest.fail("changes are still not published at once")


async def test_keys_of_earlier_versions_are_taken_in_unless_they_were_deleted(
    url: str, redis_server: RedisServer, mirror: redis.asyncio.Redis, tmp_path: Path
) -> None:
    where = redis_server.url_of("gateway")
    old = AccessRecord(name="old", sha256=digest("pk-old"), team="green", weight=3)
    twin = AccessRecord(name="twin", sha256=digest("pk-old"))
    await publish(mirror, put(first_record("pk-first"), SECRET), put(old, SECRET))
    await mirror.hset(keys.ACCESS_KEYS, "twin", seal_record(twin, SECRET))
    await mirror.hset(keys.ACCESS_KEYS, "forged", seal_record(twin, "of others"))
    async with serving(url, where, tmp_path) as api:
        await wait_until_ready(api)
        await until(lambda: is_there(api, "old"))
        shown = await api.get("/admin/keys/old")
        assert (shown["team"], shown["weight"], shown["created_by"]) == ("green", 3.0, "an earlier version")
        assert (await api.get("/admin/keys/first"))["role"] == "admin"
        assert (await api.get("/admin/teams/green"))["name"] == "green"
        await api.refused(404, "GET", "/admin/keys/twin")
        await api.refused(404, "GET", "/admin/keys/forged")
        await api.delete("/admin/keys/old")
        kept = await mirror.hgetall(keys.ACCESS_KEYS)
    await mirror.flushall()
    for field, value in kept.items():
        await mirror.hset(keys.ACCESS_KEYS, text(field), value)
    await mirror.hset(keys.ACCESS_KEYS, "old", seal_record(old, SECRET))
    async with serving(url, where, tmp_path) as api:
        await wait_until_ready(api)
        await until(lambda: lacks(mirror, "old"))
        await api.refused(404, "GET", "/admin/keys/old")


async def is_there(api: AdminApi, name: str) -> bool:
    return (await api.ask("GET", f"/admin/keys/{name}")).status_code == 200


async def lacks(mirror: redis.asyncio.Redis, name: str) -> bool:
    return name not in await names(mirror)


async def test_a_first_key_that_gateways_replaced_is_not_put_back(
    url: str, redis_server: RedisServer, mirror: redis.asyncio.Redis, tmp_path: Path
) -> None:
    await publish(mirror, put(first_record("pk-first"), SECRET))
    async with serving(url, redis_server.url_of("gateway"), tmp_path) as api:
        await wait_until_ready(api)
        await until(lambda: is_there(api, "first"))
        await publish(mirror, put(first_record("pk-preset"), SECRET))
        await api.patch("/admin/keys/first", {"metadata": {"note": "kept"}})
        value = await mirror.hget(keys.ACCESS_KEYS, "first")
        assert value is not None
        assert open_record(value, SECRET).sha256 == digest("pk-preset")
        assert (await api.get("/admin/keys/first"))["hash"] == digest("pk-preset")[:8]


async def test_a_first_key_that_a_gateway_made_later_is_taken_in(api: AdminApi, mirror: redis.asyncio.Redis) -> None:
    await publish(mirror, put(first_record("pk-first"), SECRET))
    assert await until(lambda: is_there(api, "first")) < 5
    assert (await api.get("/admin/keys/first"))["hash"] == digest("pk-first")[:8]


async def test_what_somebody_deleted_in_redis_comes_back_at_a_start(
    url: str, redis_server: RedisServer, mirror: redis.asyncio.Redis, tmp_path: Path
) -> None:
    where = redis_server.url_of("gateway")
    async with serving(url, where, tmp_path) as api:
        await wait_until_ready(api)
        await api.post("/admin/keys", {"name": "ci"})
    await publish(mirror, delete("key:ci"), delete("team:default"))
    async with serving(url, where, tmp_path):
        await until(lambda: has_names(mirror, {"ci"}))
        assert await mirror.hexists(keys.ACCESS_SUBJECTS, "team:default")


async def test_a_rebuilding_that_died_is_taken_over(
    url: str, redis_server: RedisServer, mirror: redis.asyncio.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accounts.access.publisher.STUCK_S", 0.5)
    where = redis_server.url_of("gateway")
    async with serving(url, where, tmp_path) as api:
        await wait_until_ready(api)
        await api.post("/admin/keys", {"name": "ci"})
        position = await mirror.get(keys.ACCESS_POSITION)
        assert position is not None
        await mirror.flushall()
        await mirror.set(keys.ACCESS_POSITION, f"{text(position).split()[0]} rebuild 0123 7")
        await until(lambda: has_names(mirror, {"ci"}))
