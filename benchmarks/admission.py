"""What admission costs a call: a slot taken and given back, in one gateway process with a Redis on the same machine.

The reference is what any script costs that way: two calls of a script that does nothing, one after the other.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import redis.asyncio
import uvloop

from benchmarks.table import Row
from gateway.admission.admission import Admission
from gateway.registry.fleet import Fleet
from gateway.store.client import Store, connect
from tests.support.pool import SECRET, beat, call, heartbeat
from tests.support.redis_server import RedisServer

CALLS = 2000
WORKERS = 8


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds per call."""

    wall_us: float
    cpu_us: float
    """Of the gateway's process; Redis has its own."""

    def __str__(self) -> str:
        return f"{self.wall_us:.0f} µs, {self.cpu_us:.0f} µs of CPU"


def measure(size: int) -> list[Row]:
    """The best of `size` rounds."""
    return uvloop.run(_measure(size))


async def _measure(rounds: int) -> list[Row]:
    with RedisServer() as server:
        async with connect(server.url) as client:
            bare = min([await _bare(client) for _ in range(rounds)], key=lambda cost: cost.wall_us)
            rows = [Row("two empty scripts, one after the other", str(bare), "1", "", True)]
            for together, slots in ((1, 8), (64, 8), (64, 2)):
                cost = await _admitted(client, together, slots, rounds)
                what = f"{together} at a time on {WORKERS * slots} slots"
                if together > WORKERS * slots:
                    what += ", most of them through the line"
                rows.append(Row(what, str(cost), f"{cost.wall_us / bare.wall_us:.1f}", "", True))
            return rows


async def _bare(client: redis.asyncio.Redis) -> Cost:
    sha = await client.script_load("return 1")
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(CALLS):
        await client.evalsha(sha, 1, "pd:{m}:")
        await client.evalsha(sha, 1, "pd:{m}:")
    return Cost((time.perf_counter() - wall) / CALLS * 1e6, (time.process_time() - cpu) / CALLS * 1e6)


async def _admitted(client: redis.asyncio.Redis, together: int, slots: int, rounds: int) -> Cost:
    await client.flushall()
    for number in range(WORKERS):
        await beat(client, heartbeat(f"w{number}", slots=slots), ttl_s=100.0)
    fleet = Fleet(client, SECRET)
    admission = Admission(Store(client), fleet, "bench", max_queue=together)
    await fleet.refresh()
    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(fleet.run()), tasks.create_task(admission.run())]
        await asyncio.sleep(0.2)
        costs = [await _round(admission, together) for _ in range(rounds)]
        await admission.close()
        for task in background:
            task.cancel()
    return min(costs, key=lambda cost: cost.wall_us)


async def _round(admission: Admission, together: int) -> Cost:
    wanted = call(patience_s=60.0)

    async def caller() -> None:
        for _ in range(CALLS // together):
            async with admission.slot(wanted):
                pass

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(caller() for _ in range(together)))
    calls = CALLS // together * together
    return Cost((time.perf_counter() - wall) / calls * 1e6, (time.process_time() - cpu) / calls * 1e6)
