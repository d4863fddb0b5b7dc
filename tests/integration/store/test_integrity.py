"""The integrity check finds each kind of damage; a check that never fails would prove nothing elsewhere."""

from __future__ import annotations

import pytest
import redis.asyncio

from gateway.store.client import Offer, Offers, Order, Store
from gateway.store.integrity import IntegrityError, check_integrity
from tests.support.pool import beat, heartbeat
from workers.protocol import keys

MODEL = "a[b]*?\\model"
"""Not a name that Paddock allows, but the check must not read it as a pattern."""

LEASES, CALLS, LEDGER = keys.worker_leases(MODEL, "w1"), keys.calls(MODEL), keys.ledger(MODEL)


def lease(*, fence: str = "1", boot: str = "boot1") -> str:
    """The record of a lease of team `team`."""
    return f"L {fence} 7 1.0 1.0 w1 {boot} g1 http://w1:1\nteam"


DAMAGE: dict[str, list[tuple[str, ...]]] = {
    "counts on worker w1 and has no record": [("HDEL", CALLS, "held")],
    "lease held is for worker w1 and counts on worker None": [("ZREM", LEASES, "held")],
    "lease held counts on worker": [("ZADD", keys.worker_leases(MODEL, "w2"), "1e15", "held")],
    "worker w1 has leases but is not among the leased": [("HDEL", LEDGER, "w:w1")],
    "is for process other, not boot1": [("HSET", CALLS, "held", lease(boot="other"))],
    "the record of held can't be read": [("HSET", CALLS, "held", lease(fence="x"))],
    "worker w1 has 3 leases for 2 slots": [("ZADD", LEASES, "1e15", "x"), ("ZADD", LEASES, "1e15", "y")],
    "ticket waits is both in the line and granted": [("HSET", CALLS, "waits", lease())],
    "ticket waits is in the line and has no record": [("HDEL", CALLS, "waits")],
    "a record but no expiry": [("ZREM", keys.tickets(MODEL), "waits")],
    "ticket waits is neither in the line nor granted": [("ZREM", keys.queue(MODEL), "waits")],
    "ticket waits has rank 2 and stands at 9": [("ZADD", keys.queue(MODEL), "9", "waits")],
    "ticket gone was overtaken and has no record": [("HSET", keys.passed(MODEL), "gone", "3")],
    "worker w1 has 99 KV tokens leased, its leases 7": [("HSET", LEDGER, "w:w1", "boot1 1 99 1")],
    "worker w1 is told to have 5 leases": [("HSET", LEDGER, "w:w1", "boot1 5 7 1")],
    "team team has 1 tickets and is told to have 4": [("HSET", LEDGER, "t:team", "2 4 1")],
    "team team has 1 leases and is told to have 3": [("HSET", LEDGER, "t:team", "2 1 3")],
}


async def fill(client: redis.asyncio.Redis) -> None:
    """One lease, and one ticket that still waits: the second slot has only just come."""
    await beat(client, heartbeat("w1", model=MODEL, slots=1))
    store = Store(client)
    offers = Offers((Offer("w1", 1.0, 2.0, 7),))
    for id in ("held", "waits"):
        order = Order(id, "team", 1.0)
        await store.acquire("g1", MODEL, order, offers, ticket_ttl_s=60.0, max_queue=10, max_team_queue=10)
    await beat(client, heartbeat("w1", model=MODEL, slots=2))


async def test_whole_data_passes(client: redis.asyncio.Redis) -> None:
    await check_integrity(client, MODEL)
    await fill(client)
    await check_integrity(client, MODEL)


@pytest.mark.parametrize("breach", DAMAGE)
async def test_damage_is_named(client: redis.asyncio.Redis, breach: str) -> None:
    await fill(client)
    async with client.pipeline() as pipeline:
        for command in DAMAGE[breach]:
            pipeline.execute_command(*command)
        await pipeline.execute()
    with pytest.raises(IntegrityError) as found:
        await check_integrity(client, MODEL)
    assert breach in str(found.value)
