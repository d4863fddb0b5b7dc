"""Calls that get, wait for, and give back slots, through one gateway and through two."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
import redis.asyncio

from gateway.call import Call
from gateway.errors import QueueFull, QueueTimeout, Stopping
from gateway.store.integrity import check_integrity
from tests.integration.admission.conftest import Gateway, Lifetimes, Start
from tests.support.pool import beat, call, drain, heartbeat
from tests.support.waiting import until
from workers.protocol import keys


class Guest:
    """One call: asks for a slot, and keeps it until told to leave."""

    def __init__(self, gateway: Gateway, wanted: Call | None = None, avoid: frozenset[str] = frozenset()) -> None:
        self.worker = ""
        self.queue_ms = 0.0
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._stay(gateway, wanted or call(), avoid))
        # What a test leaves behind is told that its gateway stops. Asyncio would log that for each, in a later test.
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def served(self) -> bool:
        return bool(self.worker)

    async def _stay(self, gateway: Gateway, wanted: Call, avoid: frozenset[str]) -> None:
        async with gateway.admission.slot(wanted, avoid) as lease:
            self.worker, self.queue_ms = lease.at.worker, lease.lease.queue_ms
            await self.leave.wait()

    async def go(self) -> None:
        self.leave.set()
        await self.task

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def in_line(client: redis.asyncio.Redis, count: int) -> None:
    """Returns when so many tickets wait in Redis."""
    for _ in range(200):
        if await client.zcard(keys.queue("m")) == count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{await client.zcard(keys.queue('m'))} tickets wait, not {count}")


async def leases(client: redis.asyncio.Redis, worker: str = "w1") -> int:
    return int(await client.zcard(keys.worker_leases("m", worker)))


async def test_a_slot_is_held_for_the_time_of_the_block(client: redis.asyncio.Redis, start: Start) -> None:
    await beat(client, heartbeat("w1", slots=2))
    one = await start("g1")
    async with one.admission.slot(call()) as lease:
        assert lease.at == heartbeat("w1").at
        assert 0 < lease.lease.queue_ms < 1000
        assert await leases(client) == 1
        assert one.admission.in_flight("m") == 1
    await one.store.close()
    assert await leases(client) == 0
    assert one.admission.in_flight("m") == 0


async def test_an_error_in_the_block_gives_the_slot_back(client: redis.asyncio.Redis, start: Start) -> None:
    await beat(client, heartbeat("w1"))
    one = await start("g1")
    with pytest.raises(ZeroDivisionError):
        async with one.admission.slot(call()):
            raise ZeroDivisionError
    await one.store.close()
    assert await leases(client) == 0


async def test_calls_spread_over_workers(client: redis.asyncio.Redis, start: Start) -> None:
    for worker in ("w1", "w2", "w3"):
        await beat(client, heartbeat(worker, slots=4))
    gateways = [await start("g1"), await start("g2")]
    guests = [Guest(gateways[number % 2]) for number in range(9)]
    await until(lambda: all(guest.served for guest in guests), 2.0, "nine calls served")
    assert max(Counter(guest.worker for guest in guests).values()) <= 4
    assert len({guest.worker for guest in guests}) == 3
    for guest in guests:
        await guest.go()


async def test_two_gateways_serve_one_line_in_order(client: redis.asyncio.Redis, start: Start) -> None:
    await beat(client, heartbeat("w1", slots=1))
    gateways = [await start("g1"), await start("g2")]
    guests = []
    for number in range(8):
        guests.append(Guest(gateways[number % 3 % 2]))
        await in_line(client, max(0, number))
    assert sum(gateway.admission.waiting("m") for gateway in gateways) == 7
    for number, guest in enumerate(guests):
        await until(lambda guest=guest: guest.served, 1.0, f"call {number} served")  # type: ignore[misc]
        assert [other.served for other in guests] == [True] * (number + 1) + [False] * (7 - number)
        await guest.go()


async def test_a_slot_is_handed_over_without_delay(client: redis.asyncio.Redis, start: Start) -> None:
    await beat(client, heartbeat("w1", slots=1))
    # Re-reading is so rare here that only the announcement can be the reason.
    rarely = Lifetimes(grant_ttl_s=20.0, ticket_ttl_s=20.0, sweep_s=10.0)
    one, other = await start("g1", lives=rarely), await start("g2", lives=rarely)
    first = Guest(one)
    await until(lambda: first.served, 1.0, "the first call served")
    second = Guest(other)
    await in_line(client, 1)
    await asyncio.sleep(0.05)
    await first.go()
    await until(lambda: second.served, 1.0, "the second call served")
    assert second.queue_ms >= 50
    await second.go()


async def test_a_full_line_refuses_and_predicts(client: redis.asyncio.Redis, start: Start) -> None:
    await beat(client, heartbeat("w1", slots=1))
    one = await start("g1", max_queue=1)
    holder = Guest(one)
    await until(lambda: holder.served, 1.0, "the first call served")
    waiter = Guest(one)
    await in_line(client, 1)
    with pytest.raises(QueueFull, match="1 calls wait for model 'm' and at most 1 may") as refused:
        async with one.admission.slot(call()):
            raise AssertionError("got a slot that is not there")
    assert 1.0 <= (refused.value.retry_after_s or 0) <= 60.0
    assert one.admission.waiting("m") == 1
    await holder.go()
    await until(lambda: waiter.served, 1.0, "the second call served")
    await waiter.go()


async def test_patience_ends(client: redis.asyncio.Redis, start: Start) -> None:
    await beat(client, heartbeat("w1", slots=1))
    one = await start("g1")
    holder = Guest(one)
    await until(lambda: holder.served, 1.0, "the first call served")
    began = time.monotonic()
    with pytest.raises(QueueTimeout, match=r"no slot of model 'm' came free in \d\.\d s .* its 1 slots were taken"):
        async with one.admission.slot(call(patience_s=0.3)):
            raise AssertionError("got a slot that is not there")
    assert 0.29 < time.monotonic() - began < 1.5
    await one.store.close()
    assert not await client.exists(keys.queue("m"), keys.tickets("m"))
    await holder.go()


async def test_a_pool_without_workers_is_waited_for(client: redis.asyncio.Redis, start: Start) -> None:
    one = await start("g1")
    guest = Guest(one)
    await in_line(client, 1)
    await beat(client, heartbeat("w1"))
    await until(lambda: guest.served, 1.0, "served by the worker that came")
    await guest.go()
    with pytest.raises(QueueTimeout, match="no worker of model 'empty' came"):
        async with one.admission.slot(call("empty", patience_s=0.05)):
            raise AssertionError("got a slot that is not there")


async def test_who_waited_for_a_worker_waits_for_a_slot_anew(client: redis.asyncio.Redis, start: Start) -> None:
    """Its time without a worker is over before a slot of the one that came is free."""
    one = await start("g1")
    holder, guest = Guest(one, call(start_s=0.6)), Guest(one, call(start_s=0.6))
    await in_line(client, 2)
    await beat(client, heartbeat("w1", slots=1))
    await until(lambda: holder.served or guest.served, 1.0, "one served by the worker that came")
    await asyncio.sleep(0.7)
    first, second = (holder, guest) if holder.served else (guest, holder)
    assert not second.served
    await first.go()
    await until(lambda: second.served, 1.0, "the other one served")
    await second.go()


async def test_who_waits_for_a_slot_waits_for_a_worker_when_the_last_one_drains(
    client: redis.asyncio.Redis, start: Start
) -> None:
    record = heartbeat("w1", slots=1)
    await beat(client, record)
    one = await start("g1")
    holder = Guest(one)
    await until(lambda: holder.served, 1.0, "the first call served")
    guest = Guest(one, call(patience_s=0.6, start_s=30.0))
    await in_line(client, 1)
    await drain(client, record)
    await holder.go()
    await asyncio.sleep(0.8)
    await beat(client, heartbeat("w2"))
    await until(lambda: guest.served, 1.0, "served by the next worker")
    await guest.go()


async def test_calls_for_a_model_without_workers_stand_in_line_as_they_came(
    client: redis.asyncio.Redis, start: Start
) -> None:
    one = await start("g1")
    guests = []
    for number in range(40):
        guests.append(Guest(one))
        await in_line(client, number + 1)
    await beat(client, heartbeat("w1", slots=1))
    order = []
    for _ in guests:
        await until(lambda: any(guest.served for guest in guests if guest not in order), 2.0, "the next one served")
        guest = next(guest for guest in guests if guest.served and guest not in order)
        order.append(guest)
        await guest.go()
    late = max(abs(guests.index(guest) - place) for place, guest in enumerate(order))
    assert late <= 16, "so many of those next in line are asked who loses most by waiting"


async def test_a_draining_worker_gets_nothing_until_it_is_back(client: redis.asyncio.Redis, start: Start) -> None:
    record = heartbeat("w1")
    await beat(client, record)
    one = await start("g1")
    await drain(client, record)
    guest = Guest(one)
    await in_line(client, 1)
    await asyncio.sleep(0.3)
    assert not guest.served
    await beat(client, record)
    await until(lambda: guest.served, 1.0, "served when the worker is back")
    await guest.go()


async def test_an_avoided_worker_is_left_alone(client: redis.asyncio.Redis, start: Start) -> None:
    await beat(client, heartbeat("bad", slots=8))
    await beat(client, heartbeat("good", slots=1))
    one = await start("g1")
    first = Guest(one, avoid=frozenset({"bad"}))
    await until(lambda: first.served, 1.0, "the first call served")
    second = Guest(one, avoid=frozenset({"bad"}))
    await in_line(client, 1)
    await first.go()
    await until(lambda: second.served, 1.0, "the second call served")
    assert (first.worker, second.worker) == ("good", "good")
    await second.go()


async def test_giving_up_leaves_the_line(client: redis.asyncio.Redis, start: Start) -> None:
    await beat(client, heartbeat("w1", slots=1))
    one = await start("g1")
    holder = Guest(one)
    await until(lambda: holder.served, 1.0, "the first call served")
    quitter, stayer = Guest(one), Guest(one)
    await in_line(client, 2)
    await quitter.cancel()
    await in_line(client, 1)
    await holder.go()
    await until(lambda: stayer.served, 1.0, "the one who stayed is served")
    assert not quitter.served
    await stayer.go()


async def test_giving_up_at_any_moment_leaves_nothing(client: redis.asyncio.Redis, start: Start) -> None:
    await beat(client, heartbeat("w1", slots=1))
    one = await start("g1")
    for number in range(60):
        guests = [Guest(one) for _ in range(3)]
        await asyncio.sleep(number * 0.0001)
        for guest in guests:
            await guest.cancel()
    await one.store.close()
    assert await leases(client) == 0
    assert not await client.exists(keys.queue("m"), keys.tickets("m"))


async def test_closing_gives_everything_back(client: redis.asyncio.Redis, start: Start) -> None:
    await beat(client, heartbeat("w1", slots=1))
    one, other = await start("g1"), await start("g2")
    holder = Guest(one)
    await until(lambda: holder.served, 1.0, "the first call served")
    mine, theirs = Guest(one), Guest(other)
    await in_line(client, 2)
    assert await client.exists(keys.gateway("g1"))
    await one.admission.close()
    with pytest.raises(Stopping):
        await mine.task
    with pytest.raises(Stopping):
        async with one.admission.slot(call()):
            raise AssertionError("a closed gateway gives no slots")
    await until(lambda: theirs.served, 1.0, "the other gateway's call served")
    assert not await client.exists(keys.gateway("g1"))
    await holder.go()
    await check_integrity(client, "m")
    assert await leases(client) == 1
    await theirs.go()


async def test_a_call_that_waits_asks_again_whom_to_avoid(client: redis.asyncio.Redis, start: Start) -> None:
    """A worker that has failed it recovers, or another process is in its place by then."""
    for worker in ("w1", "w2"):
        await beat(client, heartbeat(worker, slots=1))
    one = await start("g1")
    avoided = frozenset({"w1"})
    async with one.admission.slot(call(), avoided) as held:
        assert held.at.worker == "w2"

        async def wait() -> str:
            async with one.admission.slot(call(), avoided, avoid_now=lambda: avoided) as second:
                return second.at.worker

        waiting = asyncio.create_task(wait())
        await in_line(client, 1)
        await asyncio.sleep(0.4)
        assert not waiting.done()
        avoided = frozenset()
        async with asyncio.timeout(2.0):
            assert await waiting == "w1"
