"""Two gateways without Redis: each places calls on its share of the slots, and Redis learns of it when it is back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import redis.asyncio
from msgspec.structs import replace

from gateway.admission.admission import HeldSlot
from gateway.admission.degraded import SlotShare
from gateway.admission.maintenance import ASKING_AT_ONCE
from gateway.errors import QueueFull, QueueTimeout, StoreUnavailable
from gateway.store.client import connect
from gateway.store.integrity import check_integrity
from gateway.store.outage import raise_if_cancelled
from gateway.telemetry.answer_log import QueuePosition
from tests.integration.admission.conftest import Gateway, Lifetimes, Start
from tests.integration.admission.test_slots import Guest
from tests.support.pool import beat, call, heartbeat
from tests.support.redis_server import RedisServer
from tests.support.waiting import until
from workers.protocol import keys
from workers.protocol.heartbeat import Heartbeat

SEATED = Lifetimes(known_after_s=0.0, settle_s=4.0)
"""Nothing is granted until both gateways are surely back."""
WORKERS = (heartbeat("w1", slots=3), heartbeat("w2", slots=2))


@pytest.fixture
def fragile(server: RedisServer) -> Iterator[RedisServer]:
    """A Redis of its own, of the same version, that forgets everything when it is killed."""
    with RedisServer(server.binary) as running:
        yield running


@asynccontextmanager
async def beating(
    server: RedisServer, workers: Sequence[Heartbeat], busy: Callable[[], Counter[str]] = Counter
) -> AsyncIterator[redis.asyncio.Redis]:
    """Workers that beat whenever they can, and tell how busy they are; a client of the same Redis."""

    async def go_on() -> None:
        while True:
            try:
                for worker in workers:
                    load = replace(worker.load, slots_busy=busy()[worker.worker])
                    await beat(client, replace(worker, load=load), ttl_s=1.0, tell=False)
            except (redis.asyncio.RedisError, OSError):
                pass  # Redis is away
            raise_if_cancelled()
            await asyncio.sleep(0.05)

    async with connect(server.url) as client:
        going = asyncio.create_task(go_on())
        try:
            yield client
        finally:
            going.cancel()
            await asyncio.gather(going, return_exceptions=True)


def seat(gateway: Gateway) -> SlotShare | None:
    return gateway.admission._ring.share()


async def two(
    server: RedisServer, start_on: Start, workers: int = 2, lives: Lifetimes = SEATED, **options: int
) -> tuple[Gateway, Gateway]:
    """Gateways that know each other and the workers."""
    pair = (
        await start_on(server.url, "g1", lives=lives, **options),
        await start_on(server.url, "g2", lives=lives, **options),
    )
    for number, gateway in enumerate(pair):
        await until(lambda n=number, g=gateway: seat(g) == SlotShare(n, 2), 3.0, "seated")  # type: ignore[misc]
        await until(lambda g=gateway: len(g.fleet.snapshot.of("m")) == workers, 2.0, "saw")  # type: ignore[misc]
    return pair


def served(guests: Sequence[Guest]) -> list[Guest]:
    return [guest for guest in guests if guest.served and not guest.task.done()]


def on(guests: Sequence[Guest]) -> Counter[str]:
    return Counter(guest.worker for guest in served(guests))


async def leases(client: redis.asyncio.Redis) -> int:
    return sum([await client.zcard(keys.worker_leases("m", worker.worker)) for worker in WORKERS])


async def leave_one_by_one(guests: Sequence[Guest]) -> None:
    """Each as soon as it is served; fails where one never is."""
    left = list(guests)
    while left:
        await until(lambda: any(guest.served for guest in left), 3.0, f"one of {len(left)} served")
        guest = next(guest for guest in left if guest.served)
        await guest.go()
        left.remove(guest)


async def test_each_gateway_uses_its_share_and_no_more(fragile: RedisServer, start_on: Start) -> None:
    async with beating(fragile, WORKERS):
        pair = await two(fragile, start_on)
        fragile.kill()
        guests = [[Guest(gateway) for _ in range(6)] for gateway in pair]
        everyone = [*guests[0], *guests[1]]
        await until(lambda: len(served(everyone)) == 5, 2.0, "every slot is taken")
        await asyncio.sleep(0.3)
        assert on(everyone) == {"w1": 3, "w2": 2}
        for number, mine in enumerate(guests):
            share = {worker.worker: SlotShare(number, 2).slots_of(worker.worker, worker.slots) for worker in WORKERS}
            assert on(mine) == {worker: slots for worker, slots in share.items() if slots}
        # What comes free goes to a call of the same gateway.
        waiting = [guest for guest in guests[0] if not guest.served]
        await served(guests[0])[0].go()
        await until(lambda: any(guest.served for guest in waiting), 1.0, "the next one is served")
        assert len(served(guests[1])) == sum(on(guests[1]).values())
        await leave_one_by_one([guest for guest in everyone if not guest.task.done()])


@pytest.mark.parametrize("forgets", [True, False], ids=["empty", "with its data"])
async def test_redis_learns_what_was_placed_without_it(fragile: RedisServer, start_on: Start, forgets: bool) -> None:
    everyone: list[Guest] = []
    async with beating(fragile, WORKERS, lambda: on(everyone)) as client:
        one, other = await two(fragile, start_on)
        before = [Guest(gateway) for gateway in (one, other, one, other, one)]
        everyone += before
        await until(lambda: len(served(before)) == 5, 2.0, "all slots are taken")
        in_line = [Guest(gateway) for gateway in (one, other)]
        everyone += in_line

        def known(gateway: Gateway) -> bool:
            return sum(one.beat.load.slots_busy for one in gateway.fleet.pool("m").states.values()) == 5

        await until(lambda: known(one) and known(other), 3.0, "both know how busy the workers are")
        if forgets:
            fragile.kill()
        else:
            fragile.pause()
        for guest in before[:2]:
            await guest.go()
        everyone += [Guest(one), Guest(other)]
        most = Counter[str]()
        watching = asyncio.create_task(watch(everyone, most))
        # Those who hang on a Redis that does not answer are given up after two seconds each.
        await until(
            lambda: {"m"} == one.admission.degraded_models == other.admission.degraded_models, 5.0, "both are alone"
        )
        await before[2].go()
        await before[3].go()
        await asyncio.sleep(0.3)
        if forgets:
            fragile.start()
        else:
            fragile.resume()
        await until(lambda: not one.admission.degraded_models | other.admission.degraded_models, 4.0, "both are back")
        await until(lambda: len(served(everyone)) == 5, 10.0, "all slots are taken again")
        for _ in range(100):
            await check_integrity(client, "m")
            if await leases(client) == len(served(everyone)) == 5:
                break
            await asyncio.sleep(0.05)
        assert await leases(client) == 5
        records: list[Any] = await client.hvals(keys.calls("m"))
        fences = {record.split(b" ")[1] for record in records if record.startswith(b"L ")}
        assert len(fences - {b"0"}) == 5, "each has a token of its own"
        await leave_one_by_one([guest for guest in everyone if not guest.task.done()])
        for gateway in (one, other):
            await gateway.store.close()
        await until_gone(client)
        await check_integrity(client, "m")
        watching.cancel()
        assert most == {"w1": 3, "w2": 2}, "no slot was used twice"


async def test_slots_that_a_hung_redis_gives_when_it_goes_on_are_not_taken(
    fragile: RedisServer, start_on: Start
) -> None:
    """It knows of none that gateways have placed meanwhile, and was asked for these before they gave it up."""
    rarely = Lifetimes(known_after_s=0.0, settle_s=4.0, sweep_s=1.0)  # it answers before it hears what was placed
    async with beating(fragile, [heartbeat("w1", slots=2)]) as client:
        one, other = await two(fragile, start_on, workers=1, lives=rarely)
        holders = [Guest(one), Guest(other)]
        await until(lambda: len(served(holders)) == 2, 2.0, "all slots are taken")
        fragile.pause()
        for guest in holders:
            await guest.go()
        await asyncio.sleep(0.1)
        asked = [Guest(one), Guest(one)]  # behind what ends the wait for Redis
        await until(
            lambda: {"m"} == one.admission.degraded_models == other.admission.degraded_models, 5.0, "both are alone"
        )
        placed = Guest(other)
        await until(lambda: placed.served, 1.0, "it is placed on the other one's share")
        everyone = [*asked, placed]
        most = Counter[str]()
        watching = asyncio.create_task(watch(everyone, most))
        fragile.resume()
        await until(lambda: not one.admission.degraded_models | other.admission.degraded_models, 6.0, "both are back")
        await until(lambda: len(served(everyone)) == 2, 1.0, "the share of the first one is taken")
        await placed.go()
        await until(lambda: all(guest.served for guest in asked), 6.0, "Redis gives what is free")
        assert await client.zcard(keys.worker_leases("m", "w1")) == 2
        await leave_one_by_one(asked)
        watching.cancel()
        assert most == {"w1": 2}, "no slot was used twice"
        for gateway in (one, other):
            await gateway.store.close()
        await until_gone(client)
        await check_integrity(client, "m")


async def watch(guests: Sequence[Guest], most: Counter[str]) -> None:
    """Keeps the largest number of calls that each worker had at once."""
    while True:
        most |= on(guests)
        await asyncio.sleep(0.002)


async def until_gone(client: redis.asyncio.Redis) -> None:
    for _ in range(100):
        left = await client.hkeys(keys.calls("m")) + await client.zrange(keys.tickets("m"), 0, -1)
        if not left:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(left)


async def test_who_waits_longer_goes_first_but_for_its_class(fragile: RedisServer, start_on: Start) -> None:
    async with beating(fragile, [heartbeat("w1", slots=1)]):
        one = await start_on(fragile.url, "g1", lives=SEATED)
        await until(lambda: seat(one) == SlotShare(0, 1) and bool(one.fleet.snapshot.of("m")), 2.0, "seated")
        fragile.kill()
        order: list[int] = []

        async def ask(number: int, priority: int) -> None:
            async with one.admission.slot(call(), priority=priority):
                order.append(number)
                await asyncio.sleep(0.02)

        await asyncio.gather(*(ask(number, priority) for number, priority in enumerate((0, 0, 0, 0))))
        assert order == [0, 1, 2, 3]
        order.clear()
        holder = Guest(one)
        await until(lambda: holder.served, 1.0, "the slot is taken")
        asking = [asyncio.create_task(ask(number, priority)) for number, priority in enumerate((0, 1, 0, 1))]
        await asyncio.sleep(0.05)
        queue_position = QueuePosition()
        last = asyncio.create_task(stay(one.admission.slot(call(), queue_position=queue_position)))
        await until(lambda: queue_position.position == 5, 1.0, "it is told where it stands")
        assert queue_position.wait_s > 0
        last.cancel()
        await holder.go()
        await asyncio.gather(*asking)
        assert sorted(order[:2]) in ([0, 2], [1, 3]), "one class before the other"
        assert order[0] < order[1]
        assert order[2] < order[3]


async def stay(slot: AbstractAsyncContextManager[HeldSlot]) -> None:
    async with slot:
        await asyncio.Event().wait()


async def test_bounds_of_the_line_are_shared_as_well(fragile: RedisServer, start_on: Start) -> None:
    async with beating(fragile, WORKERS):
        one, _ = await two(fragile, start_on, max_queue=3)
        fragile.kill()
        share = sum(SlotShare(0, 2).slots_of(worker.worker, worker.slots) for worker in WORKERS)
        guests = [Guest(one) for _ in range(share + 2)]
        await until(lambda: one.admission.waiting("m") == 2, 2.0, "two of them wait")
        with pytest.raises(QueueFull, match="whose part of max_queue is 2 while Redis is away"):
            async with one.admission.slot(call()):
                raise AssertionError("got a slot that is not there")
        await guests.pop().cancel()
        with pytest.raises(QueueTimeout, match="uses its share"):
            async with one.admission.slot(call(patience_s=0.1)):
                raise AssertionError("got a slot that is not there")
        await leave_one_by_one(guests)


async def test_a_gateway_that_has_no_share_says_why(fragile: RedisServer, start_on: Start) -> None:
    leaving = heartbeat("w2", model="leaving", draining=True)
    async with beating(fragile, [heartbeat("w1", slots=1), leaving]):
        pair = await two(fragile, start_on, workers=1)
        late = await start_on(fragile.url, "g3", lives=Lifetimes(known_after_s=60.0))
        await until(lambda: seat(pair[0]) == SlotShare(0, 3), 3.0, "the third is known")
        fragile.kill()
        outcomes = []
        for gateway in (*pair, late):
            try:
                async with gateway.admission.slot(call("m", patience_s=0.5)):
                    outcomes.append("served")
            except StoreUnavailable as error:
                outcomes.append(str(error))
            except QueueTimeout:
                outcomes.append("waited")
        assert "does not know yet which slots are its own" in outcomes[2]
        assert sum("none of the slots of model 'm' is this gateway's share" in text for text in outcomes) >= 1
        assert outcomes.count("served") <= 1
        for model in ("leaving", "nobody"):
            queue_position = QueuePosition()
            with pytest.raises(QueueTimeout, match=f"no worker of model '{model}' came"):
                async with pair[0].admission.slot(call(model, patience_s=0.1), queue_position=queue_position):
                    raise AssertionError("got a slot of nobody")
            assert (queue_position.filed, queue_position.for_worker, queue_position.predicted_s) == (1, True, None)


async def test_a_team_without_a_slot_is_lent_one(fragile: RedisServer, start_on: Start) -> None:
    """Another team holds all of this gateway's share; the worker slices."""
    workers = (heartbeat("w1", slots=2, overdraft=2),)
    async with beating(fragile, workers):
        gateway, _ = await two(fragile, start_on, workers=1)
        fragile.kill()
        share = seat(gateway).slots_of("w1", 2)  # type: ignore[union-attr]
        hogs = [Guest(gateway, call(team="red")) for _ in range(share + 2)]
        await until(lambda: len(served(hogs)) == share, 5.0, "the share is taken")
        others = [Guest(gateway, call(team="blue")) for _ in range(2)]
        await until(lambda: len(served(others)) == 1, 5.0, "one of the other team is served beside them")
        await asyncio.sleep(1.0)
        assert (len(served(hogs)), len(served(others))) == (share, 1)
        await next(guest for guest in others if guest.served).go()
        await until(lambda: len(served(others)) == 1, 5.0, "its next one takes its place")
        for guest in (*others, *hogs):
            await guest.cancel()


async def test_when_redis_is_back_calls_ask_it_a_few_at_a_time(fragile: RedisServer, start_on: Start) -> None:
    """Where it goes away again at once, all that have asked turn to the share in one turn of the event loop."""
    async with beating(fragile, WORKERS):
        gateway = await start_on(fragile.url, "g1", lives=SEATED)
        await until(lambda: seat(gateway) == SlotShare(0, 1), 3.0, "seated")
        await until(lambda: len(gateway.fleet.snapshot.of("m")) == 2, 2.0, "saw")
        fragile.kill()
        guests = [Guest(gateway) for _ in range(5 + 3 * ASKING_AT_ONCE)]
        await until(
            lambda: len(served(guests)) == 5 and gateway.admission.waiting("m") == 3 * ASKING_AT_ONCE, 4.0, "wait"
        )

        num_asking, most, acquire = 0, 0, gateway.store.acquire

        async def is_away_again(*args: Any, **options: Any) -> Any:
            nonlocal num_asking, most
            num_asking += 1
            most = max(most, num_asking)
            await asyncio.sleep(0.05)
            num_asking -= 1
            raise StoreUnavailable("away again")

        gateway.store.acquire = is_away_again  # type: ignore[method-assign]
        fragile.start()
        await until(lambda: most > 0, 5.0, "it is back")
        await asyncio.sleep(0.1)
        assert most == ASKING_AT_ONCE
        # When it stays, all have asked in the end.
        gateway.store.acquire = acquire  # type: ignore[method-assign]
        await until(
            lambda: all(waiter.filed for waiter in gateway.admission._queue.waiters_of("m")), 10.0, "all are in line"
        )
        assert gateway.admission.waiting("m") == 3 * ASKING_AT_ONCE
