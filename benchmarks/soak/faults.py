"""What goes wrong meanwhile, one fault after the other. Each leaves the fleet as it found it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from benchmarks.soak.fleet import EMBEDDER, TOY, Fleet
from gateway.client import AsyncClient

Fault = Callable[[Fleet, random.Random], Awaitable[None]]
BACK_S = 60.0


async def worker_killed(fleet: Fleet, chance: random.Random) -> None:
    """The supervised one; done when the supervisor has the next one ready."""
    name = f"{TOY}-0"
    before = (await fleet.worker_urls())[name]
    os.kill(fleet.pids()[name], signal.SIGKILL)
    await until_back(fleet, name, before)


async def worker_came_and_went(fleet: Fleet, chance: random.Random) -> None:
    """One more worker of the model, under an id that none had before, as pods have; stopped in order or killed."""
    worker_id = f"passing-{chance.randrange(1 << 30):x}"
    worker = await asyncio.to_thread(fleet.passing_worker, worker_id)
    await asyncio.sleep(chance.uniform(1.0, 5.0))
    await asyncio.to_thread(worker.kill if chance.random() < 0.5 else worker.stop)


async def worker_paused(fleet: Fleet, chance: random.Random) -> None:
    """The wired one: for a moment, or long enough to be taken for dead."""
    assert fleet.wired is not None
    fleet.wired.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(chance.choice([0.5, 2.0, 6.0]))
    finally:
        fleet.wired.signal(signal.SIGCONT)


async def gateway_restarted(fleet: Fleet, chance: random.Random) -> None:
    await asyncio.to_thread(fleet.restart_gateway, 1)


async def redis_cut(fleet: Fleet, chance: random.Random) -> None:
    """All connections to Redis, some times in a row."""
    for _ in range(chance.randrange(1, 4)):
        for kind in ("normal", "pubsub"):
            with contextlib.suppress(RedisError, OSError):
                await fleet.client.client_kill_filter(_type=kind, skipme=False)
        await asyncio.sleep(chance.uniform(0.0, 0.5))


async def redis_paused(fleet: Fleet, chance: random.Random) -> None:
    fleet.stack.redis.pause()
    try:
        await asyncio.sleep(chance.choice([0.5, 1.5, 4.0]))
    finally:
        fleet.stack.redis.resume()


async def network_cut(fleet: Fleet, chance: random.Random) -> None:
    """Every connection between the gateways and the wired worker, some times in a row."""
    for _ in range(chance.randrange(1, 6)):
        fleet.wire.cut()
        await asyncio.sleep(chance.uniform(0.05, 0.5))


async def network_stalled(fleet: Fleet, chance: random.Random) -> None:
    fleet.wire.stall()
    try:
        await asyncio.sleep(chance.choice([0.5, 1.5, 12.0]))
    finally:
        fleet.wire.go_on()


async def model_reloaded(fleet: Fleet, chance: random.Random) -> None:
    """Unloaded and loaded again by an admin; done when its worker is back."""
    name = f"{EMBEDDER}-0"
    before = (await fleet.worker_urls())[name]
    async with AsyncClient(fleet.urls[0], fleet.stack.key) as client:
        await client.models.unload(EMBEDDER)
        await asyncio.sleep(2.0)
        await client.models.load(EMBEDDER)
    await until_back(fleet, name, before)


async def until_back(fleet: Fleet, name: str, before: str) -> None:
    """Until that worker is registered at another address. Raises TimeoutError."""
    async with asyncio.timeout(BACK_S):
        while (await fleet.worker_urls()).get(name, before) == before:  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.2)


HARMLESS: tuple[Fault, ...] = (
    worker_paused,
    redis_cut,
    network_cut,
    worker_came_and_went,
    redis_paused,
    network_stalled,
)
"""After these every process is the one that it was."""
RESTARTING: tuple[Fault, ...] = (worker_killed, gateway_restarted, model_reloaded)
ALL = (*RESTARTING, *HARMLESS)
