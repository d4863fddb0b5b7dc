"""Clocks that jump under calls in every phase. Leases, tickets and grants know one clock, Redis' own."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from tests.fault.scene import PHASES, SHORT, staged
from tests.support.clocks import Clock, under
from tests.support.stack import Stack
from workers.protocol import keys

HOUR_S = 3600


@pytest.mark.long
async def test_of_gateways_and_workers(stack: Stack, tmp_path: Path) -> None:
    """One gateway goes an hour ahead, the other an hour back, the workers a day ahead: nobody notices."""
    clocks = [Clock(tmp_path, name) for name in ("doomed", "other", "workers")]
    for clock in clocks[:2]:
        with under(clock.of_python()):
            stack.gateway(wait=False)
    with under(clocks[2].of_python()):
        async with staged(stack) as scene:
            await scene.all_phases()
            for clock, ahead_s in zip(clocks, (HOUR_S, -HOUR_S, 24 * HOUR_S), strict=True):
                clock.set(ahead_s)
            scene.doomed.signal(signal.SIGCONT)
            in_time = {"x-slo-ttft-ms": "5000"}
            for gateway in (scene.doomed, scene.other):
                for model in ("streaming", "queued", "prefilling"):
                    scene.book.ask(gateway, model, SHORT, headers=in_time)
            await scene.ends(scene.book.records)
            assert scene.book.endings() == {"answered": len(scene.book.records) - 1, "left": 1}
            await scene.report("gateways' and workers' clocks jumped", 2.0)


@pytest.fixture
def redis_clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path, "redis")


@pytest.fixture
def shifted(redis_clock: Clock) -> Iterator[Stack]:
    """A stack whose Redis has that clock."""
    with ExitStack() as held:
        with under(redis_clock.of_any()):
            running = held.enter_context(Stack())
        yield running


@pytest.mark.long
async def test_of_redis_ahead(shifted: Stack, redis_clock: Clock) -> None:
    """Every lease, ticket and record has expired at once: whoever lives writes its own again."""
    async with staged(shifted) as scene:
        await scene.all_phases()
        before_s = clock_of(shifted)
        redis_clock.set(HOUR_S)
        assert clock_of(shifted) - before_s >= HOUR_S
        scene.doomed.signal(signal.SIGCONT)
        await scene.ends(scene.book.records)
        assert scene.book.endings() == {"answered": len(scene.book.records) - 1, "left": 1}
        await scene.report("Redis' clock an hour ahead", 8.0)


@pytest.mark.long
async def test_of_redis_back(shifted: Stack, redis_clock: Clock) -> None:
    """What has its end in an hour now is not kept that long for a gateway and workers that die at that moment."""
    async with staged(shifted) as scene:
        records, _ = await scene.all_phases()
        redis_clock.set(-HOUR_S)
        scene.strike(signal.SIGKILL, scene.doomed, scene.workers["streaming"])
        await asyncio.sleep(0.1)
        await scene.ends(scene.book.records)
        assert {records[phase].ending for phase in PHASES} == {"broken"}
        await scene.report("Redis' clock an hour back", keys.LEASE_TTL_S + 4.0)


def clock_of(stack: Stack) -> int:
    with redis.Redis(unix_socket_path=str(stack.redis.socket)) as client:
        return int(client.time()[0])
