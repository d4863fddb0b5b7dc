"""The line as people are told of it, against a real Redis."""

from __future__ import annotations

import pytest
import redis.asyncio

from gateway.store.client import Filed, Lease, Offer, Offers, Order, QueueLimitReached, Store
from gateway.store.queue_inspector import QueuedBid, QueueInspector, QueueView
from tests.support.pool import beat, heartbeat

CLASSES = 8


async def looked(client: redis.asyncio.Redis, *workers: str) -> QueueView:
    return await QueueInspector(client).inspect("m", workers, CLASSES)


async def file(store: Store, order: Order, *, within_ms: float = 0.0) -> Lease | Filed:
    wanted = Offers(
        (Offer("w1", 10.0, 250.5, 300, 5.0, 2.0),), (Offer("w2", 20.0, 12.0, 400),), begin_within_ms=within_ms
    )
    answer = await store.acquire("g1", "m", order, wanted, ticket_ttl_s=60, max_queue=9, max_team_queue=9)
    assert isinstance(answer, Lease | Filed)
    return answer


async def test_a_line_that_nobody_stands_in(client: redis.asyncio.Redis) -> None:
    assert await looked(client, "w1") == QueueView(False, 0, {}, {}, (), {"w1": (0, 0)})


async def test_who_waits_by_class_and_team_and_with_what_bids(client: redis.asyncio.Redis) -> None:
    store = Store(client)
    await beat(client, heartbeat("w1", slots=1))
    lease = await file(store, Order("a", "red", 100.0))
    assert isinstance(lease, Lease)
    await file(store, Order("b", "red", 100.0))
    await file(store, Order("c", "red", 100.0, priority=-8))
    await file(store, Order("d", "blue", 1.0, priority=3), within_ms=5000)

    before = await client.dbsize()
    line = await looked(client, "w1", "w2")
    assert await client.dbsize() == before
    assert (line.waiting, line.settling) == (3, False)
    assert line.by_priority == {-8: 1, 0: 1, 3: 1}
    assert line.by_team == {"red": 2, "blue": 1}
    assert line.leased == {"w1": (1, 300), "w2": (0, 0)}
    assert [(ticket.team, ticket.priority) for ticket in line.head] == [("blue", 3), ("red", 0), ("red", -8)]
    first, second, _ = line.head
    rates = {worker: bid.rate for worker, bid in first.bids.items()}
    assert rates == pytest.approx({"w1": 237.5 / 11, "w2": -8 / 21})
    assert first.bids == {
        "w1": QueuedBid(10.0, 250.0, 300, rates["w1"]),
        "w2": QueuedBid(20.0, 12.0, 400, rates["w2"]),
    }
    assert first.elsewhere is None
    assert first.begin_in_s is not None
    assert 4 < first.begin_in_s <= 5
    assert second.begin_in_s is None
    assert first.waited_s is not None
    assert 0 <= first.waited_s < 2
    assert (first.gateway, first.overtaken) == ("g1", 0)
    await store.withdraw("g1", "m", ["a", "b", "c", "d"])


async def test_who_was_overtaken_is_told_with_its_slot(client: redis.asyncio.Redis) -> None:
    store = Store(client)
    await beat(client, heartbeat("w1", slots=1))

    async def ask(id: str, other_ms: float) -> Lease | Filed | QueueLimitReached:
        wanted = Offers((Offer("w1", 10.0, other_ms, 0),))
        order = Order(id, "team", 1.0)
        return await store.acquire("g1", "m", order, wanted, ticket_ttl_s=60, max_queue=9, max_team_queue=9)

    lease = await ask("a", 20.0)
    assert isinstance(lease, Lease)
    assert lease.overtaken == 0
    await ask("patient", 20.0)
    await ask("hurried", 900.0)
    await store.release("g1", lease)
    hurried = await store.claim("g1", "m", "hurried", Offers())
    assert hurried is not None
    assert hurried.overtaken == 0
    assert (await looked(client)).head[0].overtaken == 1
    await store.release("g1", hurried)
    patient = await store.claim("g1", "m", "patient", Offers())
    assert patient is not None
    assert patient.overtaken == 1
    await store.release("g1", patient)
