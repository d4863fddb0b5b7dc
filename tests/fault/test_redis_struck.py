"""Redis killed and stopped under calls in every phase: whoever waits goes on waiting, whoever runs goes on running."""

from __future__ import annotations

import asyncio
import signal

import pytest

from gateway.admission.admission import KNOWN_AFTER_S
from tests.fault.scene import SHORT, staged
from tests.support.stack import Stack
from workers.protocol import keys


@pytest.mark.parametrize("away_s", [0.5, pytest.param(8.0, marks=pytest.mark.long)])
async def test_killed(stack: Stack, away_s: float) -> None:
    """It comes back empty: leases and tickets are written anew by those who hold them."""
    async with staged(stack) as scene:
        # Until each gateway knows which slots are its own without Redis.
        await asyncio.sleep(KNOWN_AFTER_S + 2 * keys.GATEWAY_INTERVAL_S)
        await scene.all_phases()
        scene.redis_down = True
        await asyncio.to_thread(stack.redis.kill)
        scene.doomed.signal(signal.SIGCONT)
        called = [scene.book.ask(scene.other, phase, SHORT) for phase in ("streaming", "queued")]
        await asyncio.sleep(away_s)
        await asyncio.to_thread(stack.redis.start)
        scene.redis_down = False
        await scene.ends(scene.book.records)
        old = [record for record in scene.book.records if record not in called]
        assert [record.ending for record in old].count("answered") == len(old) - 1
        # A pool with one slot has none for each of two gateways.
        assert called[0].answered
        assert called[1].ending in ("answered", "store_unavailable")
        print(f"\ncalled while Redis was away: {[record.ending for record in called]}")
        await scene.report(f"Redis away for {away_s:g} s", 8.0)


@pytest.mark.long
@pytest.mark.parametrize("stopped_s", [1.0, 5.0])
async def test_stopped(stack: Stack, stopped_s: float) -> None:
    """Connections stay open and nothing answers; then it goes on with what it had, some of it expired."""
    async with staged(stack) as scene:
        await scene.all_phases()
        scene.redis_down = True
        stack.redis.pause()
        scene.doomed.signal(signal.SIGCONT)
        await asyncio.sleep(stopped_s)
        stack.redis.resume()
        await scene.ends(scene.book.records)
        scene.redis_down = False
        assert scene.book.endings() == {"answered": len(scene.book.records) - 1, "left": 1}
        await scene.report(f"Redis stopped for {stopped_s:g} s", 8.0)
