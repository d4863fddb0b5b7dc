"""Leases beyond a worker's slots: teams that have less than their share get one where another team has more. On a real
Redis, with workers that slice their answers.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import redis.asyncio

from gateway.store.client import Filed, Lease, Offers, Order, Store, Ticket
from tests.integration.store.test_scripts import Caller, offers
from tests.support.pool import beat, heartbeat
from workers.protocol import keys


@pytest.fixture
def one(client: redis.asyncio.Redis) -> Caller:
    return Caller(Store(client), "g1")


async def hold(caller: Caller, team: str, count: int, worker: str = "w1", *, kv: int = 0) -> list[Lease]:
    """The team takes so many slots."""
    answers = [await caller.ask(Order(f"{team}-{worker}-{n}", team, 1.0), offers(worker, kv=kv)) for n in range(count)]
    leases = [answer for answer in answers if isinstance(answer, Lease)]
    assert len(leases) == count
    return leases


async def asked(caller: Caller, id: str, team: str, wanted: Offers | None = None, **more: float) -> Lease | Filed:
    answer = await caller.ask(Order(id, team, 1.0, **more), wanted or offers("w1"))  # type: ignore[arg-type]
    assert isinstance(answer, Lease | Filed)
    return answer


async def test_a_team_that_holds_all_yields_at_once(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=4, overdraft=4))
    await hold(one, "red", 4)
    first = await asked(one, "first", "blue")
    second = await asked(one, "second", "blue")
    assert isinstance(first, Lease)
    assert isinstance(second, Lease)
    assert isinstance(await asked(one, "third", "blue"), Filed), "half of the slots is its share"
    await one.release(second)
    assert isinstance(await one.claim("third"), Lease), "what it gives back goes on to its next call at once"


async def test_what_a_team_at_its_share_holds_stays(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=4, overdraft=4))
    for team in ("red", "blue"):
        await hold(one, team, 2)
    for team in ("red", "blue"):
        assert isinstance(await asked(one, f"{team}-more", team), Filed)
    assert (await one.store.sweep("g1", "m")).granted == 0


async def test_an_encoder_has_no_cells_to_run_out_of(client: redis.asyncio.Redis, one: Caller) -> None:
    """Its calls keep nothing: it was given one at a time, whatever slots it had, and lent none beyond."""
    await beat(client, msgspec.structs.replace(heartbeat("w1", slots=4, overdraft=8), kv_tokens=0))
    await hold(one, "red", 4, kv=300)
    assert isinstance(await asked(one, "blue", "blue", offers("w1", kv=300)), Lease)
    assert isinstance(await asked(one, "more", "red", offers("w1", kv=300)), Filed)


async def test_one_team_alone_never_goes_beyond(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=2, overdraft=2))
    await hold(one, "red", 2)
    assert isinstance(await asked(one, "more", "red"), Filed)
    assert (await one.store.sweep("g1", "m")).granted == 0


async def test_a_worker_that_cannot_slice_lends_nothing(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=4))
    await hold(one, "red", 4)
    assert isinstance(await asked(one, "more", "blue"), Filed)
    assert (await one.store.sweep("g1", "m")).granted == 0


async def test_teams_take_turns_where_there_are_more_than_slots(client: redis.asyncio.Redis, one: Caller) -> None:
    """The only slot is another team's: each gets a part of it, up to the overdraft."""
    await beat(client, heartbeat("w1", slots=1, overdraft=2))
    await hold(one, "red", 1)
    answers = [await asked(one, team, team) for team in ("blue", "green", "grey")]
    assert [isinstance(answer, Lease) for answer in answers] == [True, True, False]
    assert isinstance(answers[0], Lease)
    await one.release(answers[0])
    assert isinstance(await one.claim("grey"), Lease), "the next team's turn"


async def test_a_crowd_of_urgent_calls_does_not_starve_a_team(client: redis.asyncio.Redis, one: Caller) -> None:
    """Sixty calls of a more urgent class stand before it."""
    await beat(client, heartbeat("w1", slots=4, overdraft=4))
    await hold(one, "red", 4)
    for number in range(60):
        await asked(one, f"red{number}", "red", priority=8)
    answers = [await asked(one, f"blue{number}", "blue") for number in range(3)]
    assert [isinstance(answer, Lease) for answer in answers] == [True, True, False]


async def test_shares_follow_weights(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=4, overdraft=4))
    await hold(one, "red", 4)
    answers = [await asked(one, f"blue{number}", "blue", weight=3.0) for number in range(4)]
    assert [isinstance(answer, Lease) for answer in answers] == [True, True, True, False]


async def test_what_a_team_holds_elsewhere_counts(client: redis.asyncio.Redis, one: Caller) -> None:
    """Each team has a worker of its own: neither is owed any of the other's."""
    for worker in ("w1", "w2"):
        await beat(client, heartbeat(worker, slots=4, overdraft=4))
    held = [*await hold(one, "red", 4, "w1"), *await hold(one, "blue", 4, "w2")]
    assert isinstance(await asked(one, "more", "blue", offers("w1", "w2")), Filed)
    await one.withdraw("more")
    for lease in held[5:]:
        await one.release(lease)
    await hold(one, "red", 3, "w2")
    answer = await asked(one, "more", "blue", offers("w1", "w2"))
    assert isinstance(answer, Lease), "it has one of eight, the other team seven"
    assert answer.at.worker == "w1"


async def test_cells_are_lent_as_far_as_those_that_give_way_free_them(client: redis.asyncio.Redis, one: Caller) -> None:
    """4,096 cells are all taken: half of them are the other team's share."""
    await beat(client, heartbeat("w1", slots=4, overdraft=4))
    await hold(one, "red", 4, kv=1024)
    assert isinstance(await asked(one, "large", "blue", offers("w1", kv=3000)), Filed)
    await one.withdraw("large")
    assert isinstance(await asked(one, "small", "blue", offers("w1", kv=1024)), Lease)
    assert isinstance(await asked(one, "another", "blue", offers("w1", kv=1024)), Lease)


async def test_loans_are_restored_when_redis_has_lost_them(client: redis.asyncio.Redis, one: Caller) -> None:
    record = heartbeat("w1", slots=2, overdraft=2)
    await beat(client, record)
    red = await hold(one, "red", 2)
    blue = await asked(one, "blue", "blue")
    assert isinstance(blue, Lease)
    await client.flushall()
    await beat(client, record)
    renewed = await one.store.renew("g1", "m", [*red, blue], was_away=True)
    assert (renewed.void, renewed.crowded) == (frozenset(), frozenset())
    assert await client.zcard(keys.worker_leases("m", "w1")) == 3
    await one.withdraw("blue")


async def test_dead_gateways_leave_no_loans(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=2, overdraft=2))
    await hold(one, "red", 2)
    dead = Caller(Store(client, lease_ttl_s=0.05), "g2")
    assert isinstance(await dead.ask(Order("blue", "blue", 1.0), offers("w1")), Lease)
    await asyncio.sleep(0.1)
    assert (await one.store.sweep("g1", "m")).leases_freed == 1


async def test_a_ticket_that_was_lost_keeps_its_weight(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    await hold(one, "red", 1)
    order, wanted = Order("late", "blue", 1.0, weight=3.0), offers("w1")
    filed = await one.ask(order, wanted)
    assert isinstance(filed, Filed)
    await client.hdel(keys.calls("m"), "late")
    await client.zrem(keys.tickets("m"), "late")
    await client.zrem(keys.queue("m"), "late")
    await client.hdel(keys.ledger("m"), "t:blue")
    await one.reread(Ticket(order, filed, 60.0, wanted))
    assert b" 1.0 3.0 " in (await client.hget(keys.calls("m"), "late") or b"")
