"""Single records that something else takes away, as a Redis does that evicts: calls go on, and nothing stays wrong."""

from __future__ import annotations

import pytest
import redis.asyncio

from gateway.store.client import Store
from gateway.store.integrity import check_integrity
from tests.integration.store.test_scripts import Caller
from tests.support.pool import beat, heartbeat
from workers.protocol import keys
from workers.protocol.heartbeat import PROTOCOL_VERSION


@pytest.fixture
def one(client: redis.asyncio.Redis) -> Caller:
    return Caller(Store(client), "g1")


async def test_a_ticket_whose_record_is_lost_keeps_nobody_from_a_slot(client: redis.asyncio.Redis, one: Caller) -> None:
    """Each script of the model failed as long as the call waited, and for five seconds more."""
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    ticket = await one.file("b", "w1")
    await one.file("c", "w1")
    await client.delete(keys.ticket("m", "b"))
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
    await client.delete(keys.ticket("m", "b"))
    assert await one.reread(ticket) == {"b": 1}
    assert await client.hget(keys.fair("m"), "n:team") == b"1"


async def test_what_is_leased_is_counted_anew_when_that_is_lost(client: redis.asyncio.Redis, one: Caller) -> None:
    """Slots could not be given back, and calls were told 503."""
    await beat(client, heartbeat("w1", slots=2))
    leases = [await one.take(id, "w1", kv=30) for id in ("a", "b")]
    await client.delete(keys.leased("m"))
    await one.file("c", "w1")
    assert await client.hget(keys.leased("m"), "w1") == b"boot1 2 60 2", "no slot looks free that is not"
    await client.delete(keys.leased("m"))
    assert await one.release(leases[0])
    assert await one.claim("c") is not None
    await client.delete(keys.leased("m"))
    assert await one.withdraw("c", "b") == 2
    assert not await client.exists(keys.leased("m"))


@pytest.mark.parametrize(
    "odd",
    [{"boot": "a b c"}, {"boot": ""}, {"slots": "1e308"}, {"slots": "nan"}, {"slots": "-1e308"}, {"kv": "1e300"}],
    ids=str,
)
async def test_a_worker_that_tells_odd_things_spoils_nothing_for_longer_than_its_record_is_there(
    client: redis.asyncio.Redis, one: Caller, odd: dict[str, str]
) -> None:
    """A worker's login can write them. What was leased of it could never be read again, and each sweep failed."""
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    for number in range(3):
        await one.file(f"t{number}", "w1")
    forged = {"boot": "x", "address": "http://none:1", "protocol": str(PROTOCOL_VERSION), "slots": "4", "kv": "100"}
    for field, value in (forged | odd).items():
        await client.hset(keys.worker("m", "odd"), field, value)
    await client.sadd(keys.workers("m"), "odd")
    await one.sweep()
    await one.sweep()
    await client.delete(keys.worker("m", "odd"))
    await one.sweep()
    assert await one.release(lease)
    assert await client.hkeys(keys.leased("m")) == [b"w1"]


async def test_a_team_has_never_less_than_no_lease(client: redis.asyncio.Redis, one: Caller) -> None:
    """When the number was lost, the leases that it had counted took one each from nothing."""
    await beat(client, heartbeat("w1", slots=2))
    leases = [await one.take(id, "w1") for id in ("a", "b")]
    await client.delete(keys.fair("m"))
    for lease in leases:
        assert await one.release(lease)
    assert await client.hget(keys.fair("m"), "h:team") is None
    await check_integrity(client, "m")
