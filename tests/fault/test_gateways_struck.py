"""Gateways killed and stopped with calls in every phase: their callers see it, nobody else does."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.fault.scene import LONG, PHASES, SHORT, Scene, staged
from tests.support.stack import Stack
from tests.support.waiting import until
from workers.protocol import keys

REST_S = keys.LEASE_TTL_S + 2.0
"""A dead gateway's leases, tickets and sequences are gone after this."""


async def test_killed(stack: Stack) -> None:
    """Its connections break. Calls at the other gateway go on, and get the slots of the dead one's calls."""
    async with staged(stack) as scene:
        records, others = await scene.all_phases()
        behind = [scene.book.ask(scene.other, phase, SHORT) for phase in ("queued", "granted")]
        scene.strike(signal.SIGKILL, scene.doomed)
        await scene.ends(records.values(), 10.0)
        assert {record.ending for record in records.values()} == {"broken"}
        await scene.ends(scene.book.records)
        assert all(record.answered for record in behind)
        assert all(others[phase].answered for phase in PHASES if phase != "granted")
        print(f"\nconnections broke after {scene.last_end_s(records.values()):.2f} s")
        print(f"waited behind a dead gateway's ticket {behind[0].took_s:.2f} s, its grant {behind[1].took_s:.2f} s")
        await scene.report("a gateway killed", REST_S)


@pytest.mark.long
async def test_killed_while_it_drains(stack: Stack) -> None:
    async with staged(stack) as scene:
        records, others = await scene.all_phases()
        await drain(scene)
        scene.strike(signal.SIGKILL, scene.doomed)
        await scene.ends(scene.book.records)
        assert {record.ending for record in records.values()} <= {"broken", "answered", "shutting_down"}
        assert all(others[phase].answered for phase in PHASES if phase != "granted")
        await scene.report("a draining gateway killed", REST_S)


@pytest.mark.long
async def test_drains(stack: Stack) -> None:
    """Without a blow: every call that it had taken is answered, waiting ones included, and it ends by itself."""
    async with staged(stack) as scene:
        records, _ = await scene.all_phases()
        await drain(scene)
        await scene.ends(scene.book.records)
        assert {record.ending for record in records.values()} == {"answered"}
        assert await asyncio.to_thread(scene.doomed.popen.wait, 5.0) == 0
        await scene.report("a gateway drained", 1.0)


@pytest.mark.long
@pytest.mark.parametrize("stopped_s", [1.0, 8.0])
async def test_stopped(stack: Stack, stopped_s: float) -> None:
    """What its workers made meanwhile is read when it goes on. A grant that it missed went to the next."""
    async with staged(stack) as scene:
        await scene.all_phases()
        scene.struck.add(scene.doomed.name)
        behind = [scene.book.ask(scene.other, phase, LONG) for phase in PHASES[:4]]
        await asyncio.sleep(stopped_s)
        scene.doomed.signal(signal.SIGCONT)
        await scene.ends([*scene.book.records, *behind])
        assert scene.book.endings() == {"answered": len(scene.book.records) - 1, "left": 1}
        await scene.report(f"a gateway stopped for {stopped_s:g} s", REST_S)


async def drain(scene: Scene) -> None:
    scene.doomed.signal(signal.SIGCONT)
    scene.doomed.signal(signal.SIGTERM)
    await until(lambda: "gateway stopping" in scene.doomed.text(), 5, "the gateway drains")
