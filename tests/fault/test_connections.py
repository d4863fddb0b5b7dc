"""The connections between gateways and workers, dropped and stalled: streams go on where they were."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.fault.book import Record
from tests.fault.scene import Scene, staged
from tests.support.stack import Stack, free_port
from tests.support.waiting import until
from tests.support.wire import Wire, open_wire
from workers.protocol.framing import EVENTS_PATH

WIRED, PLAIN = "wired", "plain"
NUM_STREAMS, TOKENS = 6, 300


@asynccontextmanager
async def wired(stack: Stack) -> AsyncIterator[tuple[Scene, Wire]]:
    """A pool whose worker is reached by the wire, and one whose worker is reached as ever."""
    port = free_port()
    async with open_wire(port) as wire, staged(stack, ()) as scene:
        address = ("--port", str(port), "--address", f"http://127.0.0.1:{wire.port}")
        hired = [scene.worker(WIRED, *address, slots=8, wait=False), scene.worker(PLAIN, slots=2, wait=False)]
        for model, worker in zip((WIRED, PLAIN), hired, strict=True):
            await scene.await_worker(model, worker)
        scene.workers[WIRED].url = f"http://127.0.0.1:{port}"
        await scene.all_seen(WIRED, PLAIN)
        yield scene, wire


async def streams(scene: Scene) -> list[Record]:
    """Calls at both gateways, all of which have begun."""
    records = [scene.book.ask((scene.doomed, scene.other)[n % 2], WIRED, TOKENS) for n in range(NUM_STREAMS)]
    await asyncio.gather(*(record.has_begun() for record in records))
    return records


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 5))])
async def test_dropped_again_and_again(stack: Stack, seed: int) -> None:
    """At any byte; every stream comes through whole and no call is made twice."""
    chance = random.Random(seed)
    async with wired(stack) as (scene, wire):
        records = await streams(scene)
        while not all(record.ended_at for record in records):
            await asyncio.sleep(chance.uniform(0.02, 0.3))
            wire.cut(only=EVENTS_PATH.encode())
        await scene.ends(records)
        assert {record.ending for record in records} == {"answered"}
        assert wire.num_cut >= 10
        await scene.report(f"event streams dropped {wire.num_cut} times", 1.0)


@pytest.mark.long
async def test_everything_dropped_while_calls_come(stack: Stack) -> None:
    """A submit that is cut off may have arrived: it is cancelled there before the call is made anew."""
    chance = random.Random(0)
    async with wired(stack) as (scene, wire):
        scene.struck |= scene.tallies.keys()  # what was cancelled is made and reaches nobody
        asking = asyncio.create_task(ask_on(scene, 60))
        while not asking.done():
            await asyncio.sleep(chance.uniform(0.05, 0.4))
            wire.cut()
        await asking
        await scene.ends(scene.book.records)
        assert set(scene.book.endings()) <= {"answered", "worker_lost"}
        await scene.report(f"all connections dropped {wire.num_cut} times", 8.0)


async def ask_on(scene: Scene, num_calls: int) -> None:
    for n in range(num_calls):
        record = scene.book.ask((scene.doomed, scene.other)[n % 2], WIRED, 40)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(record.begun.wait(), 0.15)


@pytest.mark.long
@pytest.mark.parametrize("stalled_s", [1.0, 15.0])
async def test_stalled(stack: Stack, stalled_s: float) -> None:
    """A short stall is a delay. After a long one the calls are told, and the worker is used again when it is back."""
    async with wired(stack) as (scene, wire):
        scene.struck.add(scene.workers[WIRED].name)
        records = await streams(scene)
        beside = [scene.book.ask(gateway, PLAIN, TOKENS) for gateway in (scene.doomed, scene.other)]
        wire.stall()
        began = time.monotonic()
        await asyncio.sleep(stalled_s)
        wire.go_on()
        await scene.ends(scene.book.records)
        assert {record.ending for record in beside} == {"answered"}
        assert {record.ending for record in records} == {"answered" if stalled_s < 2 else "worker_lost"}
        if stalled_s > 2:
            print(f"\ncallers of a stalled worker were told after {records[0].ended_at - began:.1f} s")
        again = scene.book.ask(scene.other, WIRED, 20)
        await again.end(10.0)
        assert again.answered
        await until(lambda: not scene.left(), 8.0, "nothing is leased")
        await scene.report(f"stalled for {stalled_s:g} s", 8.0)
