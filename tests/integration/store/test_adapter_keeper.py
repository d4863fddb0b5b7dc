"""Adapters that are wanted come to the workers, whatever the workers answer: Redis and sockets are real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import redis.asyncio

from gateway.adapter_keeper import AdapterKeeper
from gateway.api.presence import beside
from gateway.inquiries import Inquiries
from gateway.registry.adapter_wishes import AdapterWishes
from gateway.relay.relay import Relay
from tests.integration.relay.scripted import ScriptedWorker, scripted_worker
from tests.support.waiting import until
from workers.protocol.adapters import AdapterInfo, AdapterState, LoadAdapter
from workers.protocol.heartbeat import Heartbeat

POET, PIRATE = LoadAdapter(name="poet", path="poet.gguf"), LoadAdapter(name="pirate", path="pirate.gguf")
LOADED = msgspec.json.encode(
    AdapterInfo(name="poet", sha256="0", size=1, rank=1, state=AdapterState.LOADED, pinned=False, calls=0)
)


@dataclass
class Shown:
    workers: Mapping[str, tuple[Heartbeat, ...]]
    models: frozenset[str] = frozenset({"m"})
    adapters: Mapping[str, str] = field(default_factory=dict)


@dataclass
class StillFleet:
    snapshot: Shown


@asynccontextmanager
async def kept(client: redis.asyncio.Redis, worker: ScriptedWorker) -> AsyncIterator[AdapterWishes]:
    """A keeper at work; the block ends with what ended it."""
    relay = Relay("gw", "", 100)
    fleet = StillFleet(Shown({"m": (worker.heartbeat(),)}))
    wishes = AdapterWishes(client, lambda: ["m"])
    await wishes.remember("m", POET)
    await wishes.remember("m", PIRATE)
    keeper = AdapterKeeper(fleet, Inquiries(fleet, relay), wishes)
    async with beside(relay.run()):
        await asyncio.sleep(0)
        relay.follow(fleet.snapshot.workers["m"])
        async with beside(keeper.run()):
            yield wishes


async def test_every_wanted_adapter_is_loaded(client: redis.asyncio.Redis) -> None:
    async with scripted_worker(reply=LOADED) as worker, kept(client, worker):
        await until(lambda: len(worker.asked) == 2, 3.0, "both are asked for")
    assert {msgspec.json.decode(body)["name"] for body in worker.asked} == {"poet", "pirate"}


async def test_one_may_be_taken_away_while_another_is_loaded(client: redis.asyncio.Redis) -> None:
    async with scripted_worker(reply=LOADED, reply_delay_s=0.2) as worker, kept(client, worker) as wishes:
        await until(lambda: len(worker.asked) == 1, 3.0, "the first is asked for")
        for name in ("poet", "pirate"):
            await wishes.forget("m", name)
        await asyncio.sleep(0.3)
    assert len(worker.asked) == 1


async def test_an_answer_that_can_not_be_read_ends_nothing(client: redis.asyncio.Redis) -> None:
    async with scripted_worker(reply=b'{"other": 1}') as worker, kept(client, worker):
        await until(lambda: len(worker.asked) == 2, 3.0, "both are asked for")
        await asyncio.sleep(0.05)
