"""Gateways, workers, messages and Redis itself going away under admission."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import redis.asyncio

from gateway.errors import PaddockError, StoreUnavailable
from gateway.store.client import Offer, Offers, Order, Store, connect
from gateway.store.integrity import check_integrity
from tests.integration.admission.conftest import Lifetimes, Start
from tests.integration.admission.test_slots import Guest, in_line, leases
from tests.support.pool import beat, call, heartbeat, vanish
from tests.support.redis_server import RedisServer
from tests.support.waiting import until
from workers.protocol import keys

ANYONE = Offers(elsewhere=Offer("", 1.0, 60_000.0, 0))


async def test_a_killed_gateway_blocks_nobody(client: redis.asyncio.Redis, start: Start) -> None:
    await beat(client, heartbeat("w1", slots=1))
    doomed, other = await start("doomed"), await start("other")
    lost = [Guest(doomed)]
    await until(lambda: lost[0].served, 1.0, "the first call served")
    lost += [Guest(doomed), Guest(doomed)]
    await in_line(client, 2)
    waiter = Guest(other)
    await in_line(client, 3)
    await doomed.kill()
    assert await until(lambda: waiter.served, 4.0, "the other gateway's call served") > 0.5
    assert await client.zcard(keys.tickets("m")) == 0
    assert await leases(client) == 1
    assert other.lost == [("m", "expired", 1)]
    await waiter.go()
    for guest in lost:
        await guest.cancel()


async def test_leases_outlive_their_lifetime_while_the_gateway_lives(client: redis.asyncio.Redis, start: Start) -> None:
    await beat(client, heartbeat("w1", slots=1))
    one = await start("g1", lives=Lifetimes(lease_ttl_s=0.4, renew_s=0.1, ticket_ttl_s=0.4, sweep_s=0.1))
    holder = Guest(one)
    await until(lambda: holder.served, 1.0, "the first call served")
    waiter = Guest(one)
    await asyncio.sleep(1.0)
    assert await leases(client) == 1
    assert not waiter.served
    await holder.go()
    await until(lambda: waiter.served, 1.0, "the second call served")
    await waiter.go()


async def test_a_lost_message_costs_one_rereading(client: redis.asyncio.Redis, start: Start) -> None:
    await beat(client, heartbeat("w1", slots=1))
    one = await start("g1", lives=Lifetimes(grant_ttl_s=2.0, sweep_s=0.4))
    raw = Store(client)
    guest = Guest(one)
    await until(lambda: guest.served, 1.0, "the first call served")
    waiter = Guest(one)
    await in_line(client, 1)
    # A release by hand, with the gateway's subscription cut off just before: nobody hears the announcement.
    (lease,) = one.admission._queue.held.values()
    assert await client.client_kill_filter(_type="pubsub")
    channel = keys.grants_channel("g1")
    assert await client.pubsub_numsub(channel) == [(channel.encode(), 0)]
    assert await raw.release("g1", lease) == 1
    await until(lambda: waiter.served, 1.5, "the second call served")
    await guest.go()
    await waiter.go()
    await raw.close()


async def test_a_grant_that_nobody_claims_passes_on(client: redis.asyncio.Redis, start: Start) -> None:
    await beat(client, heartbeat("w1", slots=1))
    one = await start("g1", lives=Lifetimes(grant_ttl_s=0.3))
    mute = Store(client)
    holder = Guest(one)
    await until(lambda: holder.served, 1.0, "the first call served")
    silent = Order("silent", "t", 1.0)
    await mute.acquire("mute", "m", silent, ANYONE, ticket_ttl_s=60.0, max_queue=100, max_team_queue=100)
    waiter = Guest(one)
    await in_line(client, 2)
    await holder.go()
    took_s = await until(lambda: waiter.served, 3.0, "the second call served")
    assert took_s > 0.25
    # The silent ticket is still at its place, and is granted again when the slot comes free.
    await in_line(client, 1)
    await waiter.go()
    await one.store.close()
    assert await mute.claim("mute", "m", "silent", ANYONE) is not None
    await mute.withdraw("mute", "m", ["silent"])


async def test_a_dead_worker_frees_its_leases(client: redis.asyncio.Redis, start: Start) -> None:
    record = heartbeat("w1", slots=1)
    await beat(client, record)
    one = await start("g1")
    holder = Guest(one)
    await until(lambda: holder.served, 1.0, "the first call served")
    waiter = Guest(one)
    await in_line(client, 1)
    await vanish(client, record)
    await beat(client, heartbeat("w2", slots=1))
    await until(lambda: waiter.served, 1.0, "served by the other worker")
    assert waiter.worker == "w2"
    assert await leases(client, "w1") == 0
    await holder.go()
    await waiter.go()


async def test_a_restarted_worker_starts_with_all_its_slots(
    client: redis.asyncio.Redis, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    await beat(client, heartbeat("w1", slots=1))
    one = await start("g1")
    holder = Guest(one)
    await until(lambda: holder.served, 1.0, "the first call served")
    waiter = Guest(one)
    await in_line(client, 1)
    await beat(client, heartbeat("w1", slots=1, boot="boot2"))
    await until(lambda: waiter.served, 1.0, "served by the new process")
    assert await leases(client) == 1
    await until(lambda: one.admission.in_flight("m") == 1, 1.0, "the void lease forgotten")
    assert "is void" in caplog.text
    assert ("m", "void", 1) in one.lost
    await holder.go()
    await one.store.close()
    assert await leases(client) == 1
    await waiter.go()


@pytest.fixture
def fragile(server: RedisServer) -> Iterator[RedisServer]:
    """A Redis of its own, of the same version, that forgets everything when it is killed."""
    with RedisServer(server.binary) as running:
        yield running


async def test_redis_restarts_empty_under_a_call_and_a_line(
    fragile: RedisServer, start_on: Start, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = await start_on(fragile.url, "g1"), await start_on(fragile.url, "g2")
    async with connect(fragile.url) as client:
        await beat(client, heartbeat("w1", slots=1))
        holder = Guest(one)
        await until(lambda: holder.served, 1.0, "the first call served")
        guests = []
        for number, gateway in enumerate((other, one, other)):
            guests.append(Guest(gateway))
            await in_line(client, number + 1)
        fragile.kill()
        with pytest.raises(StoreUnavailable, match="does not answer"):
            async with one.admission.slot(call()):
                raise AssertionError("got a slot without Redis")
        await asyncio.sleep(0.3)
        fragile.start()
        await beat(client, heartbeat("w1", slots=1))
        await in_line(client, 3)
        assert not any(guest.served for guest in guests), "the slot is still in use"
        for number, guest in enumerate([holder, *guests]):
            await until(lambda guest=guest: guest.served, 1.0, f"call {number} served")  # type: ignore[misc]
            await check_integrity(client, "m")
            await guest.go()
        assert [guest.task.exception() for guest in guests] == [None] * 3
    away = [record for record in caplog.records if "Redis is away" in record.message]
    assert 0 < len(away) <= 8, "one line per part and gateway, however long it lasts"


async def test_a_hung_redis_is_given_up_within_the_bound(fragile: RedisServer, start_on: Start) -> None:
    one = await start_on(fragile.url, "g1", lives=Lifetimes(timeout_s=0.4))
    async with connect(fragile.url) as client:
        await beat(client, heartbeat("w1", slots=1))
        async with one.admission.slot(call()):
            pass
        fragile.pause()
        try:
            began = time.monotonic()
            with pytest.raises(StoreUnavailable):
                async with one.admission.slot(call()):
                    raise AssertionError("got a slot from a Redis that hangs")
            assert time.monotonic() - began < 2.5
        finally:
            fragile.resume()
        served = False
        for _ in range(20):
            with suppress(PaddockError):
                async with one.admission.slot(call()):
                    served = True
                    break
            await asyncio.sleep(0.1)
        assert served
        await one.store.close()
        await until_swept(client)


async def until_swept(client: redis.asyncio.Redis) -> None:
    """What the call that was given up had got to is freed by its expiry at the latest."""
    for _ in range(200):
        if await leases(client) == 0:
            break
        await asyncio.sleep(0.01)
    assert await leases(client) == 0
    await check_integrity(client, "m")


async def test_the_gateway_is_seen_to_live(client: redis.asyncio.Redis, start: Start) -> None:
    one = await start("g1")
    for _ in range(100):
        if await client.exists(keys.gateway("g1")):
            break
        await asyncio.sleep(0.01)
    await until(lambda: one.admission.redis_up, 1.0, "the heartbeat taken")
    assert 3000 < await client.pttl(keys.gateway("g1")) <= 5000
