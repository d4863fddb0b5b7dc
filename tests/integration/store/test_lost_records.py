"""Single records that something else takes away, as a Redis does that evicts: calls go on, and nothing stays wrong."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio

from gateway.errors import StoreUnavailable
from gateway.store.client import Lease, Store
from gateway.store.integrity import check_integrity
from tests.integration.store.test_scripts import Caller
from tests.support.pool import beat, heartbeat
from workers.protocol import keys
from workers.protocol.heartbeat import PLACING, PROTOCOL_VERSION


@pytest.fixture
def one(client: redis.asyncio.Redis) -> Caller:
    return Caller(Store(client), "g1")


async def test_a_ticket_whose_record_is_lost_keeps_nobody_from_a_slot(client: redis.asyncio.Redis, one: Caller) -> None:
    """Each script of the model failed as long as the call waited, and for five seconds more."""
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    ticket = await one.file("b", "w1")
    await one.file("c", "w1")
    await client.hdel(keys.calls("m"), "b")
    assert await one.release(lease)
    lease = await one.claim("c") or lease
    assert lease.id == "c"
    assert await one.reread(ticket) == {"b": 1}, "its gateway files it again"
    assert await one.release(lease)
    assert await one.claim("b") is not None


async def test_a_ticket_is_counted_once_when_its_record_was_lost(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    await one.take("a", "w1")
    ticket = await one.file("b", "w1")
    await client.hdel(keys.calls("m"), "b")
    assert await one.reread(ticket) == {"b": 1}
    assert await client.hget(keys.ledger("m"), "t:team") == b"2 1 1"


async def test_what_is_leased_is_counted_anew_when_that_is_lost(client: redis.asyncio.Redis, one: Caller) -> None:
    """Slots could not be given back, and calls were told 503."""
    await beat(client, heartbeat("w1", slots=2))
    leases = [await one.take(id, "w1", kv=30) for id in ("a", "b")]
    await client.hdel(keys.ledger("m"), "w:w1")
    await one.file("c", "w1")
    assert await client.hget(keys.ledger("m"), "w:w1") == b"boot1 2 60 2", "no slot looks free that is not"
    await client.hdel(keys.ledger("m"), "w:w1")
    assert await one.release(leases[0])
    assert await one.claim("c") is not None
    await client.hdel(keys.ledger("m"), "w:w1")
    assert await one.withdraw("c", "b") == 2
    assert not await client.hexists(keys.ledger("m"), "w:w1")


@pytest.mark.parametrize(
    "odd",
    [
        f"a b c {PROTOCOL_VERSION} 4 100 0 0 0 http://none:1",
        f" {PROTOCOL_VERSION} 4 100 0 0 0 http://none:1",
        f"x {PROTOCOL_VERSION} 1e308 100 0 0 0 http://none:1",
        f"x {PROTOCOL_VERSION} nan 100 0 0 0 http://none:1",
        f"x {PROTOCOL_VERSION} -4 100 0 0 0 http://none:1",
        f"x {PROTOCOL_VERSION} {10**400} 100 0 0 0 http://none:1",
        f"x {PROTOCOL_VERSION} 4 {10**300} 0 0 {10**300} http://none:1",
        f"x {PROTOCOL_VERSION} 4 100 0 0 0 http://none:1\n|w1=9 9 9 9|",
    ],
)
async def test_a_worker_that_tells_odd_things_spoils_nothing_for_longer_than_its_record_is_there(
    client: redis.asyncio.Redis, one: Caller, odd: str
) -> None:
    """A worker's login can write them. What was leased of it could never be read again, and each sweep failed."""
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    for number in range(3):
        await one.file(f"t{number}", "w1")
    await client.hset(keys.worker("m", "odd"), PLACING, odd)
    await client.sadd(keys.workers("m"), "odd")
    await one.sweep()
    await one.sweep()
    await client.delete(keys.worker("m", "odd"))
    await one.sweep()
    assert await one.release(lease)
    fields: list[Any] = await client.hkeys(keys.ledger("m"))
    assert [field for field in fields if field.startswith(b"w:")] == [b"w:w1"]


async def test_a_lease_whose_record_is_lost_counts_once(client: redis.asyncio.Redis, one: Caller) -> None:
    """Its gateway took it anew beside itself: the worker had a slot less until it was started again."""
    await beat(client, heartbeat("w1", slots=4))
    leases = [replace(await one.take(id, "w1", kv=30), team="team") for id in ("a", "b")]
    await client.hdel(keys.calls("m"), "a")
    renewed = await one.store.renew("g1", "m", leases)
    assert not renewed.void | renewed.crowded
    assert await client.hget(keys.ledger("m"), "w:w1") == b"boot1 2 60 4"
    await check_integrity(client, "m")
    for lease in leases:
        assert await one.release(lease)
    assert await client.hget(keys.ledger("m"), "t:team") == b"2 0 0"


async def test_a_team_has_never_less_than_no_lease(client: redis.asyncio.Redis, one: Caller) -> None:
    """When the number was lost, the leases that it had counted took one each from nothing."""
    await beat(client, heartbeat("w1", slots=2))
    leases = [await one.take(id, "w1") for id in ("a", "b")]
    await client.hdel(keys.ledger("m"), "t:team")
    for lease in leases:
        assert await one.release(lease)
    assert await client.hget(keys.ledger("m"), "t:team") == b"0 0 0"
    await check_integrity(client, "m")


GARBAGE = (
    b"\xff\xfe{\x00\x80",
    b"",
    b"a b c",
    b"nan -1 -1",
    b"x 1 1",
    b"L 1 0 x x w1 boot1 g1 \nteam",
    b"0\n\n\n|\n\n",
)


@pytest.mark.parametrize("value", GARBAGE, ids=repr)
@pytest.mark.parametrize("field", ["v", "fence", "settling", "waits", "t:team", "w:w1", "line"])
async def test_garbage_in_the_ledger_and_in_records_stops_no_script(
    client: redis.asyncio.Redis, one: Caller, field: str, value: bytes
) -> None:
    """`line`: in the record of a ticket that waits."""
    await beat(client, heartbeat("w1", slots=2))
    for waiting in (False, True):
        leases = [await one.take(id, "w1") for id in ("a", "b")]
        tickets = [await one.file(id, "w1") for id in ("c", "d") if waiting]
        for ask in (
            lambda: one.acquire("e", "w1"),
            lambda leases=leases: one.release(leases[0], 3.0),
            lambda: one.claim("c"),
            lambda tickets=tickets: one.reread(*tickets),
            lambda leases=leases: one.store.renew("g1", "m", leases[1:]),
            one.sweep,
            lambda: one.withdraw("e"),
            lambda leases=leases: one.release(leases[1]),
        ):
            if field != "line":
                await client.hset(keys.ledger("m"), field, value)
            elif waiting:
                await client.hset(keys.calls("m"), "d", value)
            await ask()
        await one.withdraw("a", "b", "c", "d", "e")
        await client.delete(keys.ledger("m"), keys.calls("m"), keys.queue("m"), keys.tickets("m"), keys.passed("m"))
        await client.delete(keys.worker_leases("m", "w1"))
    assert isinstance(await one.acquire("z", "w1"), Lease)


@pytest.mark.parametrize("name", ["worker:w2", "workers"])
async def test_a_sweep_that_fails_halfway_loses_no_slot(client: redis.asyncio.Redis, name: str) -> None:
    """A key of another type ended the script between what it had freed and its counts: the slots stayed taken."""
    one = Caller(Store(client, lease_ttl_s=0.1), "g1")
    for worker in ("w1", "w2"):
        await beat(client, heartbeat(worker, slots=2))
        await one.take(worker, worker)
    await asyncio.sleep(0.15)
    spoilt = keys.model_prefix("m") + name
    await client.delete(spoilt)
    await client.set(spoilt, "of another type")
    with pytest.raises(StoreUnavailable):
        await one.sweep()
    await client.delete(spoilt)
    for worker in ("w1", "w2"):
        await beat(client, heartbeat(worker, slots=2))
    await one.sweep()
    await check_integrity(client, "m")
    left: Any = await client.hkeys(keys.ledger("m"))
    assert set(left) == {b"", b"fence"}, "nothing is leased any more"
