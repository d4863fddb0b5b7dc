"""Gateways follow each change of a key or of what its rights depend on, however many keys there are."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest
import redis.asyncio
from msgspec.structs import replace

from accounts.protocol import changes
from accounts.protocol.changes import MAX_CHANGES, Change, delete, put
from accounts.protocol.records import (
    AccessRecord,
    AliasRecord,
    OrganisationRecord,
    TeamLimits,
    TeamRecord,
    digest,
    first_record,
    seal_record,
)
from gateway.access import record_reader
from gateway.access.control import AccessControl
from gateway.access.key_store import KeyStore
from gateway.access.keys import Keys
from gateway.call import Principal
from gateway.errors import AuthenticationFailed, KeyBlocked
from gateway.store.client import connect
from gateway.store.outage import Unreadable
from tests.integration.admission.test_fleet_bounds import turns
from tests.support.redis_fleet import ClusterFleet
from tests.support.redis_server import RedisServer, redis_binaries
from tests.support.waiting import until
from workers.protocol import keys
from workers.redis.link import run_command

SECRET = "of-gateways"
CI = AccessRecord(name="ci", sha256=digest("pk-ci"), team="red")
MANY = 100_000


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect(server.url_of("gateway")) as connected:
        await connected.delete(keys.ACCESS_KEYS, keys.ACCESS_SUBJECTS, keys.ACCESS_CHANGES, keys.ACCESS_POSITION)
        yield connected


class Gateway:
    """What one gateway knows of access."""

    def __init__(self, client: redis.asyncio.Redis, *fixed: AccessRecord) -> None:
        self.keys = Keys()
        self.refused: list[str] = []
        self.store = KeyStore(
            client, SECRET, self.keys, fixed, first_record("pk-first"), Unreadable(self.refused.append)
        )

    def holder(self, key: str) -> Principal:
        return AccessControl(self.keys).authenticate({"headers": [(b"x-api-key", key.encode())]})

    def admits(self, key: str) -> bool:
        try:
            return self.holder(key).key_id != ""
        except (AuthenticationFailed, KeyBlocked):
            return False


async def write(client: redis.asyncio.Redis, *some: Change) -> None:
    for first in range(0, len(some), MAX_CHANGES):
        await run_command(client, changes.command(some[first : first + MAX_CHANGES]))


@pytest.fixture
async def gateway(client: redis.asyncio.Redis) -> Gateway:
    known = Gateway(client)
    for _ in range(2):
        await known.store.refresh()
    return known


@pytest.fixture
async def admin(server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(server.url) as connected:
        yield connected


async def sent_for(admin: redis.asyncio.Redis, gateway: Gateway) -> int:
    """Return the number of scripts that one round runs; it sends nothing else."""
    await admin.config_resetstat()
    await gateway.store.refresh()
    stats = await admin.info("commandstats")
    return sum(int(told["calls"]) for name, told in stats.items() if name.startswith("cmdstat_eval"))


async def test_a_round_without_changes_is_one_command(
    client: redis.asyncio.Redis, admin: redis.asyncio.Redis, gateway: Gateway
) -> None:
    await write(client, put(CI, SECRET))
    assert await sent_for(admin, gateway) == 1
    assert gateway.admits("pk-ci")
    assert await sent_for(admin, gateway) == 1


async def test_keys_stay_valid_while_an_accounts_service_writes_them_anew(
    client: redis.asyncio.Redis,
    admin: redis.asyncio.Redis,
    gateway: Gateway,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record_reader, "LEAST_REREAD_S", 0.0)
    blue = AccessRecord(name="blue", sha256=digest("pk-blue"), team="blue")
    await write(client, put(CI, SECRET), put(blue, SECRET))
    await client.set(keys.ACCESS_POSITION, "db 7")
    await gateway.store.refresh()
    monkeypatch.setattr(record_reader, "REREAD_S", 0.0)
    await gateway.store.refresh()
    await admin.flushall()
    for position in ("", "db rebuild 0123 1"):
        if position:
            await client.set(keys.ACCESS_POSITION, position)
        for _ in range(2):
            await gateway.store.refresh()
        assert gateway.admits("pk-ci"), position
        assert gateway.admits("pk-blue"), position
    await write(client, put(CI, SECRET))
    await client.set(keys.ACCESS_POSITION, "db 9")
    for _ in range(2):
        await gateway.store.refresh()
    assert gateway.admits("pk-ci")
    assert not gateway.admits("pk-blue"), "deleted while Redis was empty"


async def test_each_change_is_known_after_one_round(client: redis.asyncio.Redis, gateway: Gateway) -> None:
    team = TeamRecord(name="red", organisation="works", aliases=("small",), limits=TeamLimits(max_parallel=3))
    await write(client, put(team, SECRET), put(CI, SECRET), put(AliasRecord(name="small"), SECRET))
    await gateway.store.refresh()
    principal = gateway.holder("pk-ci")
    assert (principal.organisation, principal.aliases) == ("works", frozenset({"small"}))
    assert [(subject.kind, subject.name) for subject in principal.subjects] == [("team", "red")]
    assert gateway.keys.directory.alias("small") is not None

    await write(client, put(replace(CI, sha256=digest("pk-new")), SECRET), delete("alias:small"))
    await gateway.store.refresh()
    assert not gateway.admits("pk-ci")
    assert gateway.admits("pk-new")
    assert gateway.keys.directory.alias("small") is None

    await write(client, put(OrganisationRecord(name="works", blocked=True), SECRET))
    await gateway.store.refresh()
    with pytest.raises(KeyBlocked, match="works"):
        gateway.holder("pk-new")

    await write(client, delete("organisation:works"), delete("key:ci"))
    await gateway.store.refresh()
    assert not gateway.admits("pk-new")
    assert gateway.admits("pk-first")


async def test_what_a_team_stores_is_limited_by_the_least_of_its_own_and_its_organisation_s(
    client: redis.asyncio.Redis, gateway: Gateway
) -> None:
    async def known(*some: Change) -> TeamLimits:
        await write(client, *some)
        await gateway.store.refresh()
        return gateway.keys.directory.storage("red")

    assert await known(put(CI, SECRET)) == TeamLimits()
    own = TeamLimits(tokens_per_day=5, stored_response_bytes=0, saved_slots=9)
    team = TeamRecord(name="red", organisation="works", limits=own)
    assert await known(put(team, SECRET)) == TeamLimits(stored_response_bytes=0, saved_slots=9)
    of_works = TeamLimits(stored_response_bytes=7, saved_slots=5, stored_responses=3)
    assert await known(put(OrganisationRecord(name="works", limits=of_works), SECRET)) == TeamLimits(
        stored_response_bytes=0, saved_slots=5, stored_responses=3
    )
    assert gateway.keys.directory.storage("blue") == TeamLimits(), "it is in another organisation"
    assert [subject.name for subject in gateway.holder("pk-ci").subjects] == ["red"], "those with limits of calls"
    assert await known(delete("team:red"), delete("organisation:works")) == TeamLimits()


async def test_a_key_under_two_names_is_valid_until_the_last_is_gone(
    client: redis.asyncio.Redis, gateway: Gateway
) -> None:
    await write(client, put(CI, SECRET), put(replace(CI, name="renamed"), SECRET))
    await gateway.store.refresh()
    assert gateway.holder("pk-ci").key_id == "ci"
    await write(client, delete("key:ci"))
    await gateway.store.refresh()
    assert gateway.holder("pk-ci").key_id == "renamed"
    await write(client, put(replace(CI, name="rotated", sha256=digest("pk-2"), previous_sha256=CI.sha256), SECRET))
    await gateway.store.refresh()
    assert gateway.holder("pk-ci").key_id == "renamed", "the present one before the last"
    await write(client, delete("key:renamed"), delete("key:rotated"))
    await gateway.store.refresh()
    assert not gateway.admits("pk-ci")


async def test_what_an_older_version_writes_is_found(
    client: redis.asyncio.Redis, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes without a version: the number of records tells of it, or the next reading of all."""
    monkeypatch.setattr(record_reader, "LEAST_REREAD_S", 0.0)
    await client.hset(keys.ACCESS_KEYS, "ci", seal_record(CI, SECRET))
    await gateway.store.refresh()
    assert gateway.admits("pk-ci")
    await client.hdel(keys.ACCESS_KEYS, "ci")
    await gateway.store.refresh()
    assert not gateway.admits("pk-ci")

    await write(client, put(CI, SECRET))
    await client.hset(keys.ACCESS_KEYS, "ci", seal_record(replace(CI, sha256=digest("pk-x")), SECRET))
    await gateway.store.refresh()
    monkeypatch.setattr(record_reader, "REREAD_S", 0.0)
    await gateway.store.refresh()
    assert gateway.admits("pk-x")


@pytest.mark.parametrize("lost", [[keys.ACCESS_CHANGES], [keys.ACCESS_KEYS, keys.ACCESS_SUBJECTS, keys.ACCESS_CHANGES]])
async def test_versions_that_are_lost_are_noticed(
    client: redis.asyncio.Redis, gateway: Gateway, lost: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a failover to an empty server that others have written to before this gateway asks again."""
    monkeypatch.setattr(record_reader, "LEAST_REREAD_S", 0.0)
    await write(client, put(CI, SECRET), put(replace(CI, name="b", sha256=digest("pk-b")), SECRET))
    await gateway.store.refresh()
    await write(client, delete("key:b"))
    await client.delete(*lost)
    await write(client, put(replace(CI, name="c", sha256=digest("pk-c")), SECRET))
    await gateway.store.refresh()
    assert gateway.admits("pk-ci") == (len(lost) == 1)
    assert not gateway.admits("pk-b")
    assert gateway.admits("pk-c")
    assert gateway.admits("pk-first")


async def test_records_under_names_that_are_not_theirs_are_left_out(
    client: redis.asyncio.Redis, gateway: Gateway
) -> None:
    """Whoever can write to Redis alone copies a record that was valid once, or spoils a team's limits."""
    team = TeamRecord(name="red", limits=TeamLimits(max_parallel=3))
    await write(client, Change("put", "key:other", seal_record(CI, SECRET)), put(team, SECRET))
    await gateway.store.refresh()
    assert not gateway.admits("pk-ci")
    for value in (
        b"spoilt",
        seal_record(TeamRecord(name="red"), "of-workers"),
        seal_record(replace(team, name="blue"), SECRET),
    ):
        await write(client, Change("put", "team:red", value), put(CI, SECRET))
        await gateway.store.refresh()
        assert gateway.holder("pk-ci").subjects, "the last limits hold"
    assert gateway.refused == ["pd:keys", *["{pd:keys}:subjects"] * 3]


async def test_names_of_the_settings_are_not_overruled(client: redis.asyncio.Redis) -> None:
    gateway = Gateway(client, CI)
    await write(client, put(replace(CI, sha256=digest("pk-redis")), SECRET))
    await gateway.store.refresh()
    assert gateway.admits("pk-ci")
    assert not gateway.admits("pk-redis")
    await write(client, delete("key:ci"))
    await gateway.store.refresh()
    assert gateway.admits("pk-ci")


def record_of(number: int) -> AccessRecord:
    return AccessRecord(name=f"key{number}", sha256=digest(f"pk-{number}"), team=f"team{number % 1000}")


async def redis_time(admin: redis.asyncio.Redis) -> tuple[float, int]:
    """Return the processor seconds that Redis has used, and the number of commands."""
    told = await admin.info("all")
    return told["used_cpu_user_main_thread"] + told["used_cpu_sys_main_thread"], told["total_commands_processed"]


async def test_many_keys_hold_neither_redis_nor_the_event_loop(
    client: redis.asyncio.Redis, admin: redis.asyncio.Redis
) -> None:
    teams = [TeamRecord(name=f"team{number}", limits=TeamLimits(max_parallel=9)) for number in range(1000)]
    some = [*(put(team, SECRET) for team in teams), *(put(record_of(number), SECRET) for number in range(MANY))]
    await write(client, *some)
    del some
    gateway = Gateway(client)
    gc.collect()
    async with turns() as longest:
        before_s, num_before = await redis_time(admin)
        await gateway.store.refresh()
        assert longest[0] < 0.01, longest
        after_s, num_after = await redis_time(admin)
        assert num_after - num_before > MANY / record_reader.PIECE_TEXTS
        assert (after_s - before_s) / (num_after - num_before) < 0.002, "seconds of Redis for one piece"
    assert len(gateway.keys) == MANY + 1
    await write(client, delete("key:key1"), put(replace(record_of(2), blocked=True), SECRET))
    begun = time.thread_time()
    await gateway.store.refresh()
    assert time.thread_time() - begun < 0.01, "only what has changed is read"
    assert [gateway.admits(f"pk-{each}") for each in (0, 1, 2, 3, MANY - 1)] == [True, False, False, True, True]


async def test_many_keys_take_little_memory(client: redis.asyncio.Redis) -> None:
    some = 10_000
    await write(client, *(put(record_of(number), SECRET) for number in range(some)))
    gateway = Gateway(client)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        await gateway.store.refresh()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 600 * some
    finally:
        tracemalloc.stop()


async def test_a_revocation_holds_at_once_while_all_records_are_read(client: redis.asyncio.Redis) -> None:
    """Records that were read before it do not undo it."""
    number = 20_000
    await write(client, *(put(record_of(each), SECRET) for each in range(number)))
    gateway = Gateway(client)
    reading = asyncio.create_task(gateway.store.refresh())
    try:
        await until(lambda: gateway.admits("pk-7"), 5.0, "some are read")
        assert not reading.done()
        await write(client, *(delete(f"key:key{each}") for each in range(number)))
    finally:
        await reading
    await gateway.store.refresh()
    assert [each for each in range(number) if gateway.admits(f"pk-{each}")] == []


async def test_a_revoked_key_is_refused_by_all_gateways_within_a_second(
    server: RedisServer, client: redis.asyncio.Redis, admin: redis.asyncio.Redis
) -> None:
    """Also where their connections were just lost."""
    async with connect(server.url_of("gateway")) as other:
        gateways = [Gateway(client), Gateway(other)]
        running = [asyncio.create_task(gateway.store.run()) for gateway in gateways]
        try:
            for number in range(4):
                await run_command(admin, changes.command([put(CI, SECRET)]))
                await until(lambda: all(gateway.admits("pk-ci") for gateway in gateways), 5.0, "it is valid")
                if number % 2:
                    await run_command(admin, ("CLIENT", "KILL", "USER", "paddock-gateway"))
                await run_command(admin, changes.command([delete("key:ci")]))
                took_s = await until(lambda: not any(gateway.admits("pk-ci") for gateway in gateways), 5.0, "it is not")
                assert took_s < 1.0
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running)


async def test_changes_are_followed_on_a_cluster() -> None:
    with ClusterFleet(redis_binaries()[0]) as cluster:
        async with connect(cluster.url) as client:
            gateway = Gateway(client)
            await write(client, put(TeamRecord(name="red", blocked=True), SECRET), put(CI, SECRET))
            await gateway.store.refresh()
            with pytest.raises(KeyBlocked, match="red"):
                gateway.holder("pk-ci")
            await write(client, delete("team:red"))
            await gateway.store.refresh()
            assert gateway.admits("pk-ci")
            await write(client, delete("key:ci"))
            await gateway.store.refresh()
            assert not gateway.admits("pk-ci")
            assert gateway.admits("pk-first")
