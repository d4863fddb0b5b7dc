"""Each admission script against a real Redis, called as a gateway calls it."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis.asyncio

from gateway.back_pressure import retry_after
from gateway.errors import StoreUnavailable
from gateway.store.client import (
    UNFENCED,
    Filed,
    Lease,
    Offer,
    Offers,
    Order,
    QueueLimitReached,
    Store,
    Swept,
    Ticket,
    connect,
)
from gateway.store.integrity import check_integrity
from gateway.store.scripts import FOLDER, key_names
from tests.support.pool import beat, drain, heartbeat, vanish
from workers.protocol import keys
from workers.protocol.heartbeat import PLACING, PROTOCOL_VERSION

NOBODY: frozenset[str] = frozenset()


def offers(*take: str, avoid: frozenset[str] = NOBODY, kv: int = 0) -> Offers:
    """A call to which all workers are alike, but for those that it avoids."""
    alike = Offer("", 10.0, 1000.0, kv)
    return Offers(tuple(Offer(worker, 10.0, 1000.0, kv) for worker in take), elsewhere=alike, left_out=avoid)


class Caller:
    """One gateway's view of a `Store`, with the arguments that these tests never vary."""

    def __init__(self, store: Store, gateway: str = "g1") -> None:
        self.store = store
        self.gateway = gateway

    async def ask(
        self,
        order: Order | str,
        wanted: Offers,
        *,
        ttl_s: float = 60.0,
        max_queue: int = 100,
        max_team_queue: int = 100,
    ) -> Lease | Filed | QueueLimitReached:
        if isinstance(order, str):
            order = Order(order, "team", 1.0)
        bounds = {"max_queue": max_queue, "max_team_queue": max_team_queue}
        return await self.store.acquire(self.gateway, "m", order, wanted, ticket_ttl_s=ttl_s, **bounds)

    async def acquire(
        self, id: str, *take: str, avoid: frozenset[str] = NOBODY, ttl_s: float = 60.0, max_queue: int = 100
    ) -> Lease | Filed | QueueLimitReached:
        return await self.ask(id, offers(*take, avoid=avoid), ttl_s=ttl_s, max_queue=max_queue)

    async def take(self, id: str, *take: str, kv: int = 0) -> Lease:
        answer = await self.ask(id, offers(*take, kv=kv))
        assert isinstance(answer, Lease)
        return answer

    async def file(self, id: str, *take: str, avoid: frozenset[str] = NOBODY, ttl_s: float = 60.0) -> Ticket:
        return await self.wait(id, offers(*take, avoid=avoid), ttl_s=ttl_s)

    async def wait(self, order: Order | str, wanted: Offers, *, ttl_s: float = 60.0) -> Ticket:
        """The ticket of a call that does not get a slot."""
        if isinstance(order, str):
            order = Order(order, "team", 1.0)
        answer = await self.ask(order, wanted, ttl_s=ttl_s)
        assert isinstance(answer, Filed)
        return Ticket(order, answer, ttl_s, wanted)

    async def claim(self, id: str) -> Lease | None:
        return await self.store.claim(self.gateway, "m", id, offers())

    async def release(self, lease: Lease, share: float | None = None) -> bool:
        return await self.store.release(self.gateway, lease, share)

    async def reread(self, *tickets: Ticket) -> dict[str, int]:
        return await self.store.reread(self.gateway, "m", tickets)

    async def withdraw(self, *ids: str) -> int:
        return await self.store.withdraw(self.gateway, "m", ids)

    async def sweep(self) -> Swept:
        return await self.store.sweep(self.gateway, "m")


async def line(client: redis.asyncio.Redis) -> list[bytes]:
    return [id for id in await client.zrange(keys.queue("m"), 0, -1) if isinstance(id, bytes)]


async def kind_of(client: redis.asyncio.Redis, id: str) -> bytes:
    """The first byte of a call's record."""
    record: Any = await client.hget(keys.calls("m"), id)
    return bytes(record[:1])


@pytest.fixture
def one(client: redis.asyncio.Redis) -> Caller:
    return Caller(Store(client), "g1")


@pytest.fixture
def other(client: redis.asyncio.Redis) -> Caller:
    return Caller(Store(client), "g2")


async def test_a_free_slot_is_leased_at_once(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1"))
    answer = await one.acquire("a", "w1")
    assert answer == Lease("a", 1, heartbeat("w1").at)
    expiry = await client.zscore(keys.worker_leases("m", "w1"), "a")
    ttl_ms = float(expiry or 0) - 1000 * (await client.time())[0]
    assert 5000 < ttl_ms <= 7000
    assert await client.hget(keys.calls("m"), "a") == b"L 1 0 1.0 1.0 w1 boot1 g1 http://w1:1\nteam"


async def test_the_beginning_of_a_script_does_what_all_of_it_does(client: redis.asyncio.Redis, one: Caller) -> None:
    """A mark of settling, also one that is over, has the rest of the script do it."""
    seen: dict[bool, list[Any]] = {}
    for whole in (False, True):
        await client.flushall()
        await beat(client, heartbeat("w1", slots=4))
        await one.take("first", "w1", kv=7)
        if whole:
            await client.hset(keys.ledger("m"), "settling", "1")
        pictures = seen[whole] = []

        async def look(pictures: list[Any] = pictures) -> None:
            ledger: dict[Any, Any] = await client.hgetall(keys.ledger("m"))
            ledger.pop(b"settling", None)
            held: list[Any] = await client.zrange(keys.worker_leases("m", "w1"), 0, -1)
            pictures.append((ledger, await client.hgetall(keys.calls("m")), sorted(held)))

        leases = []
        for id in ("a", "b"):
            leases.append(await one.take(id, "w1", kv=30))
            await look()
        for share in (5.5, None):
            assert await one.release(leases.pop(0), share)
            await look()
        assert await one.withdraw("first") == 1
    assert seen[True] == seen[False]
    assert len(seen[True]) == 4


async def test_the_first_ranked_worker_with_a_free_slot_is_taken(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    await beat(client, heartbeat("w2", slots=1))
    leases = [await one.take(id, "gone", "w2", "w1") for id in ("a", "b")]
    assert [lease.at.worker for lease in leases] == ["w2", "w1"]
    assert [lease.fence for lease in leases] == [1, 2]


async def test_acquiring_twice_with_one_id_is_acquiring_once(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    assert await one.take("a", "w1") == lease
    ticket = await one.file("b", "w1")
    assert await one.file("b", "w1") == ticket
    assert await client.zcard(keys.queue("m")) == 1


@pytest.mark.parametrize("kind", ["draining", "foreign", "unreadable", "gone"])
async def test_such_a_worker_gets_nothing(client: redis.asyncio.Redis, one: Caller, kind: str) -> None:
    record = heartbeat("w1")
    await beat(client, record)
    name = keys.worker("m", "w1")
    match kind:
        case "draining":
            await drain(client, record)
        case "foreign":
            await beat(client, msgspec.structs.replace(record, protocol=PROTOCOL_VERSION + 1))
        case "unreadable":
            await client.hset(name, PLACING, b"\xff")
        case "gone":
            await client.delete(name)
    await one.file("a", "w1")
    assert (await one.sweep()).granted == 0
    if kind in ("foreign", "unreadable"):
        await vanish(client, record)


async def test_the_line_is_first_come_first_served_over_gateways(
    client: redis.asyncio.Redis, one: Caller, other: Caller
) -> None:
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    for caller, id in ((other, "z"), (one, "b"), (other, "c")):
        await caller.file(id, "w1")
    served = []
    holder = one
    for caller, id in ((other, "z"), (one, "b"), (other, "c")):
        assert await caller.claim(id) is None
        assert await holder.release(lease)
        lease, holder = await caller.claim(id) or lease, caller
        served.append((lease.id, lease.fence))
    assert served == [("z", 2), ("b", 3), ("c", 4)]


async def test_nobody_overtakes_those_who_wait(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    await one.take("a", "w1")
    await one.file("b", "w1")
    await beat(client, heartbeat("w2", slots=1))
    # The new worker is ranked first for c, but b was here before.
    await one.file("c", "w2", "w1")
    granted = await one.claim("b")
    assert granted is not None
    assert granted.at.worker == "w2"
    assert await one.claim("c") is None


async def test_a_freed_slot_is_granted_and_announced_in_the_same_script(
    client: redis.asyncio.Redis, one: Caller, other: Caller
) -> None:
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    await other.file("b", "w1")
    async with client.pubsub() as pubsub:
        await pubsub.subscribe(keys.grants_channel("g2"))
        assert (await pubsub.get_message(timeout=1.0) or {})["type"] == "subscribe"
        assert await one.release(lease)
        assert (await pubsub.get_message(timeout=1.0) or {})["data"] == b"b"
    assert await client.zcard(keys.queue("m")) == 0
    assert await kind_of(client, "b") == b"G"
    assert await other.claim("b") is not None
    assert await kind_of(client, "b") == b"L"


async def test_claiming_twice_is_claiming_once(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    await one.file("b", "w1")
    await one.release(lease)
    assert await one.claim("b") == await one.claim("b") is not None


async def test_a_full_line_says_how_many_wait(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    await one.take("a", "w1")
    assert await one.acquire("b", "w1", max_queue=0) == QueueLimitReached(0)
    await one.file("c", "w1")
    assert await one.acquire("d", "w1", max_queue=1) == QueueLimitReached(1)
    assert not await client.hexists(keys.calls("m"), "d")


async def test_dead_tickets_do_not_fill_the_line(client: redis.asyncio.Redis, one: Caller) -> None:
    await one.file("a", ttl_s=0.02)
    await asyncio.sleep(0.05)
    assert isinstance(await one.acquire("b", max_queue=1), Filed)
    assert await client.zrange(keys.queue("m"), 0, -1) == [b"b"]


async def test_a_wrong_fence_changes_nothing(client: redis.asyncio.Redis, one: Caller, other: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    stale = replace(lease, fence=lease.fence + 1)
    before = await client.zscore(keys.worker_leases("m", "w1"), "a")
    assert not await one.release(stale)
    assert (await other.store.renew("g2", "m", [stale])).void == {"a"}
    assert await client.zscore(keys.worker_leases("m", "w1"), "a") == before
    assert await other.withdraw("a") == 0
    assert await one.release(lease)
    assert not await one.release(lease)


async def test_leases_are_renewed_in_one_call(client: redis.asyncio.Redis) -> None:
    store = Store(client, lease_ttl_s=0.6)
    caller = Caller(store)
    await beat(client, heartbeat("w1", slots=2))
    leases = [await caller.take(id, "w1") for id in ("a", "b")]
    for _ in range(5):
        await asyncio.sleep(0.15)
        assert (await store.renew("g1", "m", leases)).void == NOBODY
    assert (await caller.sweep()).leases_freed == 0
    await asyncio.sleep(0.65)
    assert (await caller.sweep()).leases_freed == 2


async def test_an_expired_lease_never_makes_two_of_one_slot(client: redis.asyncio.Redis) -> None:
    store = Store(client, lease_ttl_s=0.05)
    await beat(client, heartbeat("w1", slots=1))
    late = await Caller(store).take("a", "w1")
    await asyncio.sleep(0.1)
    prompt = Caller(Store(client), "g2")
    await prompt.sweep()
    lease = await prompt.take("b", "w1")
    assert (await store.renew("g1", "m", [late])).crowded == {"a"}
    await prompt.release(lease)
    # The call still runs there: it gets its slot back as soon as that is free.
    assert await store.renew("g1", "m", [late]) == await store.renew("g1", "m", [late])
    assert await client.zcard(keys.worker_leases("m", "w1")) == 1


async def test_leases_and_tickets_that_redis_lost_come_back(client: redis.asyncio.Redis) -> None:
    one = Caller(Store(client, settle_s=0.5))
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    tickets = [await one.file(id, "w1") for id in ("b", "c")]
    await client.flushall()
    await beat(client, heartbeat("w1", slots=1))
    renewed = await one.store.renew("g1", "m", [lease])
    assert (renewed.void, renewed.crowded) == (NOBODY, NOBODY)
    assert await one.reread(*reversed(tickets)) == {"c": 1, "b": 1}
    assert await client.zrange(keys.queue("m"), 0, -1) == [b"b", b"c"]
    # Other gateways may hold slots that they have not renewed yet.
    assert await one.release(lease)
    assert (await one.file("d", "w1")).filed.position == 3
    await asyncio.sleep(0.55)
    assert (await one.sweep()).granted == 1
    granted = await one.claim("b")
    assert granted is not None
    assert granted.fence > lease.fence


async def test_a_lost_ticket_far_back_wants_nothing_until_its_bids_are_sent_again(client: redis.asyncio.Redis) -> None:
    one = Caller(Store(client, settle_s=0.05))
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    ticket = await one.file("b", "w1")
    await one.withdraw("b")
    assert await one.reread(replace(ticket, offers=None)) == {"b": 1}
    await check_integrity(client, "m")
    await asyncio.sleep(0.1)
    await one.release(lease)
    assert await one.claim("b") is None
    await one.reread(ticket)
    assert await one.claim("b") is not None
    await check_integrity(client, "m")


async def test_what_was_granted_before_all_have_said_what_they_hold_is_taken_back(
    client: redis.asyncio.Redis, other: Caller
) -> None:
    """Redis hung, and has done what it was sent meanwhile."""
    one = Caller(Store(client, settle_s=0.3))
    await beat(client, heartbeat("w1", slots=2))
    leases = [await one.take(id, "w1") for id in ("a", "b")]
    tickets = [await other.file(id, "w1") for id in ("c", "d", "e")]
    for lease in leases:
        await one.release(lease)
    claimed = await other.claim("c")
    assert claimed is not None
    placed = Lease("f", UNFENCED, claimed.at, team="team")
    renewed = await one.store.renew("g1", "m", [placed], was_away=True, settle=True)
    assert (renewed.void, renewed.crowded, list(renewed.fences)) == (NOBODY, NOBODY, ["f"])
    await check_integrity(client, "m")
    assert await other.claim("d") is None
    assert await other.reread(*tickets[1:]) == {"d": 1, "e": 2}
    # Who tells later finds nothing to take back, and nothing is granted until then.
    renewed = await other.store.renew("g2", "m", [claimed], was_away=True, settle=True)
    assert (renewed.void, renewed.crowded) == (NOBODY, NOBODY)
    assert await one.withdraw("f") == 1
    assert await other.claim("d") is None
    await asyncio.sleep(0.35)
    assert (await one.sweep()).granted == 1
    assert await other.claim("d") is not None
    await check_integrity(client, "m")


async def test_leases_of_an_earlier_process_are_void(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    await beat(client, heartbeat("w1", slots=1, boot="boot2"))
    fresh = await one.take("b", "w1")
    assert fresh.at.boot == "boot2"
    assert not await one.release(lease)
    assert (await one.store.renew("g1", "m", [lease])).void == {"a"}
    assert await client.zrange(keys.worker_leases("m", "w1"), 0, -1) == [b"b"]


async def test_a_grant_on_a_worker_that_restarts_goes_on_to_the_new_process(
    client: redis.asyncio.Redis, one: Caller
) -> None:
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    await one.file("b", "w1")
    await one.release(lease)
    await beat(client, heartbeat("w1", slots=1, boot="boot2"))
    await one.sweep()
    granted = await one.claim("b")
    assert granted is not None
    assert granted.at.boot == "boot2"


async def test_a_worker_whose_record_is_gone_loses_its_leases(client: redis.asyncio.Redis, one: Caller) -> None:
    record = heartbeat("w1", slots=1)
    await beat(client, record, ttl_s=0.5)
    await one.take("a", "w1")
    await one.file("b", "w1")
    await asyncio.sleep(0.55)
    assert (await one.sweep()).leases_freed == 1
    assert not await client.exists(keys.workers("m"), keys.worker_leases("m", "w1"))
    assert not await client.hexists(keys.calls("m"), "a")
    assert not await client.hexists(keys.ledger("m"), "w:w1")
    await beat(client, record)
    assert (await one.sweep()).granted == 1


async def test_an_unclaimed_grant_passes_on_and_its_ticket_keeps_its_place(client: redis.asyncio.Redis) -> None:
    one, other = Caller(Store(client, grant_ttl_s=0.05), "g1"), Caller(Store(client), "g2")
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    await other.file("b", "w1")
    await one.file("c", "w1")
    await one.release(lease)
    assert await client.zrange(keys.worker_leases("m", "w1"), 0, -1) == [b"b"]
    await asyncio.sleep(0.1)
    assert await other.claim("b") is None, "the grant had expired; claiming it hands the slot to the oldest again"
    assert (await other.claim("b") or lease).id == "b"


async def test_an_unclaimed_grant_passes_on_to_another_gateway_first(client: redis.asyncio.Redis) -> None:
    one, mute = Caller(Store(client), "g1"), Caller(Store(client), "mute")
    hasty = Caller(Store(client, grant_ttl_s=0.05), "g1")
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    await mute.file("b", "w1")
    await mute.file("c", "w1")
    await one.file("d", "w1")
    await hasty.release(lease)
    await asyncio.sleep(0.1)
    assert (await one.sweep()).granted == 1
    granted = await one.claim("d")
    assert granted is not None
    # Where nobody else waits, it is asked again.
    await hasty.release(granted)
    await asyncio.sleep(0.1)
    assert (await one.sweep()).granted == 1
    assert await mute.claim("b") is not None


async def test_a_ticket_without_its_gateway_is_dropped_with_its_grant(client: redis.asyncio.Redis) -> None:
    one, dead = Caller(Store(client)), Caller(Store(client), "dead")
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    await dead.file("b", "w1", ttl_s=0.05)
    await dead.file("c", "w1", ttl_s=0.05)
    ticket = await one.file("d", "w1")
    await one.release(lease)
    await asyncio.sleep(0.1)
    swept = await one.sweep()
    assert (swept.tickets_dropped, swept.leases_freed, swept.granted, swept.waiting) == (2, 1, 1, 0)
    assert await one.reread(ticket) == {"d": 0}
    assert await one.claim("d") is not None


async def test_a_sweep_takes_dead_tickets_out_of_the_line(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    await one.file("b", "w1", ttl_s=0.02)
    await one.file("c", "w1")
    await asyncio.sleep(0.05)
    await one.sweep()
    await one.release(lease)
    assert await one.claim("b") is None
    assert await one.claim("c") is not None


async def test_a_withdrawn_ticket_leaves_nothing(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    for id in ("b", "c", "d"):
        await one.file(id, "w1")
    assert await one.withdraw("b", "never-heard-of") == 1
    await one.release(lease)
    # c was granted and gives up: its slot goes to d.
    assert await one.withdraw("c") == 1
    assert await one.claim("c") is None
    assert await one.claim("d") is not None
    # A lease whose caller never learnt of it is withdrawn as well.
    assert await one.withdraw("d") == 1
    assert await client.zcard(keys.worker_leases("m", "w1")) == 0


async def test_a_grant_avoids_the_workers_that_a_ticket_avoids(client: redis.asyncio.Redis, one: Caller) -> None:
    bad, good = heartbeat("bad", slots=1), heartbeat("good", slots=1)
    await beat(client, bad)
    await beat(client, good)
    on_bad, on_good = await one.take("a", "bad"), await one.take("b", "good")
    await one.file("picky", "good", avoid=frozenset({"bad"}))
    await one.file("easy", "good", "bad")
    await one.release(on_bad)
    assert await one.claim("picky") is None
    assert (await one.claim("easy") or on_good).at.worker == "bad"
    await one.release(on_good)
    assert (await one.claim("picky") or on_bad).at.worker == "good"


async def test_a_call_may_use_what_all_who_wait_avoid(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("bad", slots=1))
    await beat(client, heartbeat("good", slots=1))
    on_good = await one.take("a", "good")
    await one.file("picky", "good", avoid=frozenset({"bad"}))
    assert (await one.take("easy", "good", "bad")).at.worker == "bad"
    await one.release(on_good)
    assert await one.claim("picky") is not None


async def test_a_new_worker_serves_those_who_wait(client: redis.asyncio.Redis, one: Caller) -> None:
    tickets = [await one.file(id) for id in ("a", "b", "c")]
    await beat(client, heartbeat("w1", slots=1))
    await beat(client, heartbeat("w2", slots=1))
    assert (await one.sweep()).granted == 2
    assert await one.reread(*tickets) == {"a": 0, "b": 0, "c": 1}
    assert (await one.sweep()).granted == 0


async def test_names_of_workers_without_number_are_looked_at_some_at_a_time(
    client: redis.asyncio.Redis, one: Caller
) -> None:
    """A worker's login can write them: 100,000 kept Redis from everybody for 0.4 s, every half second."""
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.take("a", "w1")
    await one.file("b", "w1")
    await client.sadd(keys.workers("m"), *(f"none-{number}" for number in range(10_000)))

    async def looked_at(*commands: str) -> int:
        stats = await client.info("commandstats")
        return sum(stats.get(f"cmdstat_{command}", {}).get("calls", 0) for command in commands)

    before = await looked_at("pttl", "hmget")
    await one.sweep()
    assert await looked_at("pttl", "hmget") - before < 6_000
    for _ in range(10):
        await one.sweep()
    assert await client.smembers(keys.workers("m")) == {b"w1"}
    await one.release(lease)
    assert await one.claim("b") is not None


async def test_scripts_are_loaded_again_after_a_flush(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=100))
    await one.take("a", "w1")
    await client.script_flush()
    leases = await asyncio.gather(*(one.take(f"b{number}", "w1") for number in range(20)))
    await client.script_flush()
    assert all([await one.release(lease) for lease in leases])
    assert await client.zcard(keys.worker_leases("m", "w1")) == 1


def unheard() -> None:
    raise AssertionError("Redis is there")


async def test_what_nobody_awaits_is_still_done_in_order(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    asking = asyncio.ensure_future(one.acquire("a", "w1"))
    await asyncio.sleep(0)
    asking.cancel()
    one.store.post_withdraw("g1", "m", "a", unheard)
    lease = await one.take("b", "w1")
    one.store.post_release("g1", lease, None, unheard)
    await one.store.close()
    assert await client.zcard(keys.worker_leases("m", "w1")) == 0


async def test_a_redis_that_is_away_is_told_as_such(caplog: pytest.LogCaptureFixture) -> None:
    """Callers get no address; the log does, once."""
    async with connect("unix:///nonexistent/redis.sock") as away:
        caller = Caller(Store(away))
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match="does not answer") as caught:
                await caller.acquire("a", "w1")
            assert "redis.sock" not in caught.value.message
            assert retry_after(caught.value) == 1
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "/nonexistent/redis.sock" in lines[0]
    assert "PADDOCK_REDIS_URL" in lines[0]


async def test_what_lies_under_a_name_in_the_wrong_type_counts_as_an_outage(
    client: redis.asyncio.Redis, one: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    await client.set(keys.queue("m"), "not a sorted set")
    with pytest.raises(StoreUnavailable):
        await one.acquire("a", "w1")
    await client.delete(keys.queue("m"))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "acquire for pd:{m}:" in line
    assert "holds something of another type" in line


async def test_all_keys_of_a_model_share_a_cluster_slot(client: redis.asyncio.Redis, one: Caller) -> None:
    await beat(client, heartbeat("w1", slots=1))
    await one.take("a", "w1")
    await one.file("b", "w1")
    names = {str(name, "utf-8") for name in await client.keys("pd:*") if isinstance(name, bytes)} - {
        keys.MODELS,
        keys.NEWS,
    }
    assert len(names) >= 7
    assert {re.search("{(.*?)}", name).group(1) for name in names} == {"m"}  # type: ignore[union-attr]


def test_no_script_spells_a_key_name_itself() -> None:
    declared = re.findall(r'KEYS\[1\] \.\. "([a-z:-]+)"', key_names())
    assert "line" in declared
    assert "held:" in declared
    for path in FOLDER.glob("*.lua"):
        code = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("--"))
        assert "pd:" not in code
        spelt = [name for name in declared if f'.. "{name}"' in code]
        # Those below no list of names are given whole keys.
        assert not spelt, path.name
        assert "KEYS[1]" not in code or path.stem in ("beat", "news", "access_changes", "send_usage"), path.name


PARTS = (
    *("shared", "line", "overdraft", "tickets", "filing", "acquire_at_once", "release_at_once"),
    *("limits", "limits_gate", "limits_merge", "limits_window"),
)
"""What scripts are made of; each by itself is none."""


@pytest.mark.parametrize(
    "path", [path for path in FOLDER.glob("*.lua") if path.stem not in PARTS], ids=lambda path: path.stem
)
def test_every_script_states_its_contract(path: Path) -> None:
    header = path.read_text().split("\nlocal ")[0]
    assert "Result:" in header
    assert "Keeps:" in header


async def test_teams_that_are_done_leave_nothing_in_the_ledger(client: redis.asyncio.Redis, one: Caller) -> None:
    """The ledger of a model that is never idle grew with each new team, and each sweep read all of it."""
    await beat(client, heartbeat("w1", slots=2))

    async def call(id: str, team: str, share: float = 1.0) -> Lease:
        lease = await one.ask(Order(id, team, share), offers("w1"))
        assert isinstance(lease, Lease)
        return lease

    held = await call("held", "holds")
    for number in range(20):
        assert await one.release(await call(f"c{number}", f"team{number}"))
    assert await one.release(await call("ahead", "ahead", 100.0))
    for number in range(3):
        assert await one.release(await call(f"b{number}", "busy"))
    await one.sweep()
    fields: list[Any] = await client.hkeys(keys.ledger("m"))
    teams = {field for field in fields if field.startswith(b"t:")}
    assert teams == {b"t:holds", b"t:ahead", b"t:busy"}, "who has something, or has had more than others"
    await call("last", "busy")
    ticket = await one.wait(Order("again", "team1", 1.0), offers("w1"))
    assert ticket.filed.start == "3", "the virtual time, as for a team that is new"
    assert await one.withdraw("again") == 1
    assert await one.release(held)


@pytest.mark.parametrize("team", ["a\0b", "a b", "a\nb|c=1 2 3 4|", "%00", "\u2028ü", "a\rb\x0b"])
async def test_a_team_of_any_name_has_what_it_holds(client: redis.asyncio.Redis, one: Caller, team: str) -> None:
    """A NUL ended the name in the records: the team's calls were counted for another one when they ended."""
    await beat(client, heartbeat("w1", slots=1))
    lease = await one.ask(Order("a", team, 1.0), offers("w1"))
    assert isinstance(lease, Lease)
    ticket = await one.wait(Order("b", team, 1.0), offers("w1"))
    await one.reread(ticket)
    await check_integrity(client, "m")
    assert await one.release(lease)
    granted = await one.claim("b")
    assert granted is not None
    await check_integrity(client, "m")
    assert await one.release(granted)
    await check_integrity(client, "m")
