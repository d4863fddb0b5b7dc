"""Whom a free slot goes to: fair shares of teams, what is lost by waiting, deadlines, KV tokens. On a real Redis."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import msgspec
import pytest
import redis.asyncio

from gateway.store.client import Lease, Offer, Offers, Order, QueueLimitReached, Store, Ticket
from tests.integration.store.test_scripts import Caller, line, offers
from tests.support.pool import beat, heartbeat
from workers.protocol import keys

MOST_PASSED = 8
"""As in shared.lua."""


def likes(
    worker: str, cost_ms: float, other_ms: float, *, rest_ms: float | None = None, within_ms: float = 0
) -> Offers:
    """A call that is `cost_ms` on one worker; on any other one `rest_ms`, or it would not do."""
    rest = None if rest_ms is None else Offer("", rest_ms, cost_ms, 0)
    return Offers((Offer(worker, cost_ms, other_ms, 0),), elsewhere=rest, begin_within_ms=within_ms)


@pytest.fixture
def one(client: redis.asyncio.Redis) -> Caller:
    return Caller(Store(client), "g1")


async def next_of(caller: Caller, lease: Lease, *ids: str) -> Lease:
    """Gives the lease back -> whose turn it was."""
    await caller.release(lease)
    for id in ids:
        granted = await caller.claim(id)
        if granted is not None:
            return granted
    raise AssertionError("nobody was granted the slot")


async def test_a_slot_goes_to_whoever_loses_most_by_waiting(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    await one.wait("cold", likes("w1", 1000.0, 1500.0))
    await one.wait("warm", likes("w1", 50.0, 1500.0))
    await one.wait("late", likes("w1", 50.0, 1500.0))
    order = []
    for _ in range(3):
        lease = await next_of(one, lease, "cold", "warm", "late")
        order.append(lease.id)
    assert order == ["warm", "late", "cold"]


async def test_nobody_takes_a_worker_that_it_is_worse_off_with(client: redis.asyncio.Redis, one: Caller) -> None:
    """It has its prompt cached on w1, which is soon free; w2 is free now."""
    for worker in ("w1", "w2"):
        await beat(client, heartbeat(worker, slots=1))
    on_1, on_2 = await one.take("a", "w1"), await one.take("b", "w2")
    ticket = await one.wait("picky", likes("w1", 50.0, 8000.0, rest_ms=8000.0))
    await one.release(on_2)
    assert await one.claim("picky") is None
    assert (await one.take("other", "w2")).at.worker == "w2"
    # w1 turns out to be busy for longer than the prompt takes on w2.
    anew = Offers((Offer("w2", 8000.0, 20_000.0, 0),), elsewhere=None)
    assert await one.reread(Ticket(ticket.order, ticket.filed, 60.0, anew)) == {"picky": 1}
    await one.withdraw("other")
    assert (await one.claim("picky") or on_1).at.worker == "w2"


async def test_new_bids_are_offered_what_is_free(client: redis.asyncio.Redis, one: Caller) -> None:
    for worker in ("w1", "w2"):
        await beat(client, heartbeat(worker, slots=1))
    await one.take("a", "w1")
    ticket = await one.wait("picky", likes("w1", 50.0, 8000.0, rest_ms=8000.0))
    anew = Offers((Offer("w2", 8000.0, 20_000.0, 0),), elsewhere=None)
    assert await one.reread(Ticket(ticket.order, ticket.filed, 60.0, anew)) == {"picky": 1}
    assert (await one.reread(Ticket(ticket.order, ticket.filed, 60.0, None))) == {"picky": 0}
    granted = await one.claim("picky")
    assert granted is not None
    assert granted.at.worker == "w2"


async def test_overtaking_has_an_end(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    await one.wait("cold", likes("w1", 5000.0, 5100.0))
    for number in range(MOST_PASSED):
        await one.wait(f"warm{number}", likes("w1", 10.0, 5000.0))
        lease = await next_of(one, lease, "cold", f"warm{number}")
        assert lease.id == f"warm{number}"
    await one.wait("warm", likes("w1", 10.0, 5000.0))
    lease = await next_of(one, lease, "cold", "warm")
    assert lease.id == "cold"


async def test_the_earliest_deadline_that_can_be_met_comes_first(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    await one.wait("warm", likes("w1", 10.0, 60_000.0))
    await one.wait("missed", likes("w1", 9000.0, 60_000.0, within_ms=8000.0))
    await one.wait("later", likes("w1", 100.0, 60_000.0, within_ms=30_000.0))
    await one.wait("soon", likes("w1", 100.0, 60_000.0, within_ms=10_000.0))
    order = []
    for _ in range(4):
        lease = await next_of(one, lease, "warm", "missed", "later", "soon")
        order.append(lease.id)
    assert order == ["soon", "later", "warm", "missed"]


async def test_a_higher_class_goes_first(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    await one.take("a", "w1")
    for id, priority in (("batch", -3), ("normal", 0), ("chat", 2), ("normal2", 0)):
        await one.wait(Order(id, "team", 1e6, priority), offers("w1"))
    assert await line(client) == [b"chat", b"normal", b"normal2", b"batch"]


async def test_a_short_prompt_is_not_behind_another_teams_fifty_long_ones(
    client: redis.asyncio.Redis, one: Caller
) -> None:
    await beat(client, heartbeat("w1", slots=1))
    await one.take("a", "w1")
    for number in range(50):
        await one.wait(Order(f"long{number}", "batch", 30_000.0), offers("w1"))
    await one.wait(Order("short", "chat", 200.0), offers("w1"))
    assert (await line(client)).index(b"short") == 0


async def test_weights_share_a_saturated_worker(client: redis.asyncio.Redis, one: Caller) -> None:
    """1 : 3 by weight, whatever each call takes, and though calls take something else than was predicted."""
    await beat(client, heartbeat("w1", slots=1))
    chance = random.Random(5)
    weights, took = {"small": 1.0, "large": 3.0}, Counter[str]()
    waiting: dict[str, tuple[str, float]] = {}
    lease = await one.take("first", "w1")

    async def come(team: str, number: int) -> None:
        tokens = chance.choice([200.0, 1000.0, 4000.0])
        waiting[f"{team}{number}"] = team, tokens * chance.uniform(0.7, 1.3)
        await one.wait(Order(f"{team}{number}", team, tokens / weights[team]), offers("w1"))

    for team in weights:
        for number in range(10):
            await come(team, number)
    actual = None
    for number in range(10, 510):
        await one.release(lease, actual)
        (granted,) = set(waiting) - {id.decode() for id in await line(client)}
        team, tokens = waiting.pop(granted)
        lease = await one.claim(granted) or lease
        took[team] += round(tokens)
        actual = tokens / weights[team]
        await come(team, number)
    assert took["large"] / took["small"] == pytest.approx(3.0, rel=0.05)


async def test_a_team_that_was_away_has_saved_nothing_up(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    for number in range(20):
        await one.release(await one.ask(Order(f"busy{number}", "busy", 1000.0), offers("w1")))  # type: ignore[arg-type]
    await one.take("a", "w1")
    for number in range(4):
        await one.wait(Order(f"busy-{number}", "busy", 1000.0), offers("w1"))
        await one.wait(Order(f"idle-{number}", "idle", 1000.0), offers("w1"))
    places = [id.decode().split("-")[0] for id in await line(client)]
    assert Counter(places[:4])["idle"] <= 3, "it goes on from now, not from when it was last there"


async def test_what_is_given_up_is_not_charged(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    await one.take("a", "w1")
    for number in range(10):
        await one.wait(Order(f"x{number}", "fickle", 1000.0), offers("w1"))
        await one.withdraw(f"x{number}")
    await one.wait(Order("steady", "steady", 1500.0), offers("w1"))
    await one.wait(Order("fickle", "fickle", 1000.0), offers("w1"))
    assert await line(client) == [b"fickle", b"steady"]


async def test_a_team_has_a_bound_of_its_own(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    for number in range(2):
        await one.wait(Order(f"x{number}", "many", 1.0), offers("w1"))
    refused = await one.ask(Order("x2", "many", 1.0), offers("w1"), max_team_queue=2)
    assert refused == QueueLimitReached(2, of_team=True)
    await one.wait(Order("y", "few", 1.0), offers("w1"))
    await next_of(one, lease, "x0")
    await one.wait(Order("x3", "many", 1.0), offers("w1"))


async def test_kv_tokens_are_leased(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=4))  # 4096 cells
    first = await one.take("a", "w1", kv=3000)
    await one.wait("big", offers("w1", kv=2000))
    small = await one.take("small", "w1", kv=500)
    assert await client.hget(keys.ledger("m"), "w:w1") == b"boot1 2 3500 4"
    await one.release(small)
    await one.release(first)
    assert await one.claim("big") is not None
    assert await client.hget(keys.ledger("m"), "w:w1") == b"boot1 1 2000 4"


async def test_an_empty_worker_takes_a_call_of_any_size(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    assert (await one.take("a", "w1", kv=10**6)).kv_tokens == 10**6


async def test_what_a_worker_reports_counts_where_it_is_more(client: redis.asyncio.Redis, one: Caller) -> None:
    record = heartbeat("w1", slots=4)
    await beat(client, record)
    await one.take("a", "w1", kv=10)
    await beat(client, msgspec.structs.replace(record, kv_tokens_used=4000))  # its answer is longer than was predicted
    await one.wait("b", offers("w1", kv=500))


async def test_room_is_kept_for_a_prompt_that_was_passed_often(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=4))
    held = [await one.take(f"held{number}", "w1", kv=1000) for number in range(4)]
    await one.wait("big", offers("w1", kv=3000))
    for number in range(MOST_PASSED):
        await one.wait(f"s{number}", offers("w1", kv=1000))
        held.append(await next_of(one, held.pop(0), f"s{number}"))
    await one.wait("s", offers("w1", kv=1000))
    await one.release(held.pop())
    await one.release(held.pop())
    assert await one.claim("s") is None
    await one.release(held.pop())
    assert await one.claim("big") is not None
    await one.release(held.pop())
    assert await one.claim("s") is not None


async def test_ranks_keep_their_digits(client: redis.asyncio.Redis, one: Caller) -> None:
    """A year of tokens, in the lowest class: the order of two calls is still told apart."""
    await beat(client, heartbeat("w1", slots=1))
    await one.take("a", "w1")
    await client.hset(keys.ledger("m"), "v", "40000000000000.25")
    await one.wait(Order("b", "t1", 1.0, -8), offers("w1"))
    await one.wait(Order("c", "t2", 0.5, -8), offers("w1"))
    assert await line(client) == [b"c", b"b"]


async def test_virtual_time_begins_anew_when_nobody_is_there(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    await one.sweep()
    assert await client.hexists(keys.ledger("m"), "t:team")
    await one.release(lease)
    await one.sweep()
    assert await client.hgetall(keys.ledger("m")) == {b"": b"-" * 65, b"fence": b"1"}, "tokens go on"


async def test_a_sweep_that_is_not_urgent_is_one_gateways(client: redis.asyncio.Redis, one: Caller) -> None:
    await one.file("a", ttl_s=0.02)
    await one.store.sweep("g1", "m", pause_s=0.3)
    await asyncio.sleep(0.05)
    assert (await one.store.sweep("g2", "m", pause_s=0.3)).tickets_dropped == 0
    assert (await one.store.sweep("g2", "m")).tickets_dropped == 1


async def test_a_deadline_does_not_take_another_teams_time(client: redis.asyncio.Redis, one: Caller) -> None:
    """A team that asks for more than its share is always near its deadlines; the other has time left, and a turn."""
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    await one.wait(Order("modest", "modest", 10.0), likes("w1", 100.0, 9000.0, within_ms=60_000.0))
    await one.wait(Order("greedy", "greedy", 99.0), likes("w1", 100.0, 9000.0, within_ms=5000.0))
    lease = await next_of(one, lease, "modest", "greedy")
    assert lease.id == "modest"
    # Its own calls, and those of nobody's hurry, it may overtake.
    await one.wait(Order("easy", "modest", 1.0), likes("w1", 100.0, 9000.0))
    lease = await next_of(one, lease, "greedy", "easy")
    assert lease.id == "greedy"


async def test_virtual_time_does_not_run_ahead_of_the_head_of_the_line(
    client: redis.asyncio.Redis, one: Caller
) -> None:
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    await one.wait(Order("head", "t", 10.0), likes("w1", 9000.0, 9001.0))
    for number in range(5):
        await one.wait(Order(f"x{number}", "t", 1000.0), likes("w1", 9000.0, 9001.0))
    await one.wait(Order("far", "t", 1.0), likes("w1", 1.0, 9000.0))
    await next_of(one, lease, "far")
    assert float(await client.hget(keys.ledger("m"), "v") or 0) < 100
