"""Adapters that are registered come to the workers, others leave, whatever the workers answer: Redis and sockets are
real.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import redis.asyncio
from msgspec.structs import replace

from gateway.adapters.desired import AdapterRecord, DesiredAdapters
from gateway.adapters.reconciler import AdapterReconciler
from gateway.api.intake.disconnect import beside
from gateway.registry.snapshot import FleetSnapshot
from gateway.relay.relay import Relay, WorkerQueries
from tests.integration.relay.scripted import ScriptedWorker, scripted_worker
from tests.support.still_fleet import StillFleet
from tests.support.waiting import until
from workers.protocol.queries import ADAPTERS_PATH, AdapterInfo, AdapterState, LoadAdapter, decode_load

OLD, NEW = "01" * 32, "02" * 32
POET = AdapterRecord(name="poet", base="m", path="poet.gguf", sha256=NEW)
PIRATE = AdapterRecord(name="pirate", base="m", path="pirate.gguf", sha256=NEW, pinned=True)
INFO = AdapterInfo(
    name="poet", sha256=NEW, size=1, rank=1, state=AdapterState.KNOWN, pinned=False, calls=0, path="poet.gguf"
)
TOLD = msgspec.json.encode(INFO)


@asynccontextmanager
async def kept(wishes: DesiredAdapters, worker: ScriptedWorker, **hashes: str) -> AsyncIterator[None]:
    """A keeper at work on a worker that has adapters of these contents; the block ends with what ended it."""
    relay = Relay("gw", "secret", 100)
    beat = replace(worker.heartbeat(), adapters=tuple(hashes), adapter_hashes=hashes)
    fleet = StillFleet(FleetSnapshot({"m": (beat,)}, frozenset({"m"})))
    keeper = AdapterReconciler(fleet, WorkerQueries(fleet, relay), wishes)
    async with beside(relay.run()):
        await asyncio.sleep(0)
        relay.follow(fleet.snapshot.workers["m"])
        async with beside(keeper.run()):
            yield


async def registered(client: redis.asyncio.Redis, *records: AdapterRecord) -> DesiredAdapters:
    wishes = DesiredAdapters(client, lambda: ["m"])
    for record in records:
        await wishes.register(record)
    return wishes


def loads(worker: ScriptedWorker) -> dict[str, LoadAdapter]:
    return {asked.name: asked for asked in map(decode_load, (body.encode() for body in worker.asked if body))}


async def test_every_registered_adapter_is_brought(client: redis.asyncio.Redis) -> None:
    wishes = await registered(client, POET, PIRATE)
    async with scripted_worker(reply=TOLD) as worker, kept(wishes, worker):
        await until(lambda: len(worker.asked) == 2, 3.0, "both are asked for")
    assert loads(worker) == {"poet": POET.ask(), "pirate": PIRATE.ask()}


async def test_other_contents_under_the_name_are_replaced_and_the_same_left_alone(client: redis.asyncio.Redis) -> None:
    wishes = await registered(client, POET, PIRATE)
    async with scripted_worker(reply=TOLD) as worker, kept(wishes, worker, poet=OLD, pirate=NEW):
        await until(lambda: bool(worker.asked), 3.0, "one is asked for")
        await asyncio.sleep(0.05)
    assert loads(worker) == {"poet": POET.ask()}


async def test_what_was_taken_away_is_taken_from_a_worker_that_still_has_it(client: redis.asyncio.Redis) -> None:
    wishes = await registered(client, POET)
    await wishes.unregister("m", "poet")
    async with scripted_worker(reply=TOLD) as worker, kept(wishes, worker, poet=NEW):
        await until(lambda: bool(worker.asks), 3.0, "the worker is told")
        await asyncio.sleep(0.05)
    assert worker.asks == [("DELETE", f"{ADAPTERS_PATH}/poet")]


async def test_what_redis_has_lost_is_registered_again_from_a_worker(client: redis.asyncio.Redis) -> None:
    wishes = await registered(client)
    fixed = replace(INFO, name="fixed", fixed=True)
    elsewhere = replace(INFO, name="elsewhere", path="")
    async with (
        scripted_worker(replies={"GET": msgspec.json.encode([INFO, fixed, elsewhere])}) as worker,
        kept(wishes, worker, poet=NEW, fixed=NEW, elsewhere=NEW),
    ):
        await until(lambda: bool(worker.asks), 3.0, "the worker is asked")
        await asyncio.sleep(0.05)
        await wishes.refresh()
    assert wishes.records("m") == {"poet": POET}
    assert worker.asks == [("GET", ADAPTERS_PATH)]


async def test_one_may_be_taken_away_while_another_is_brought(client: redis.asyncio.Redis) -> None:
    wishes = await registered(client, POET, PIRATE)
    async with scripted_worker(reply=TOLD, reply_delay_s=0.2) as worker, kept(wishes, worker):
        await until(lambda: len(worker.asked) == 1, 3.0, "the first is asked for")
        for name in ("poet", "pirate"):
            await wishes.unregister("m", name)
        await asyncio.sleep(0.3)
    assert len(worker.asked) == 1


async def test_an_answer_that_can_not_be_read_ends_nothing(client: redis.asyncio.Redis) -> None:
    wishes = await registered(client, POET, PIRATE)
    async with scripted_worker(reply=b'{"other": 1}') as worker, kept(wishes, worker):
        await until(lambda: len(worker.asked) == 2, 3.0, "both are asked for")
        await asyncio.sleep(0.05)
