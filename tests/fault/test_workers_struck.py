"""Workers killed and stopped under calls in every phase."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.fault.scene import PHASES, staged
from tests.support.stack import Stack

BEGUN = ("streaming", "draining")
"""Their callers have tokens; the other calls can be made anew elsewhere."""
NOT_BEGUN = ("queued", "granted", "prefilling")


async def test_killed(stack: Stack) -> None:
    """What had not begun is answered by the next process; the rest is told at once. Nobody waits for a dead worker."""
    async with staged(stack) as scene:
        records, others = await scene.all_phases()
        scene.strike(signal.SIGKILL, *scene.workers.values())
        scene.doomed.signal(signal.SIGCONT)
        told = [records[phase] for phase in BEGUN] + [others[phase] for phase in ("queued", *BEGUN)]
        await scene.ends(told, 5.0)
        assert {record.ending for record in told} == {"worker_lost"}
        told_s = scene.last_end_s(told)
        await scene.staff(*NOT_BEGUN)
        await scene.ends(scene.book.records)
        assert {phase: records[phase].ending for phase in NOT_BEGUN} == dict.fromkeys(NOT_BEGUN, "answered")
        assert others["prefilling"].answered
        print(f"\ncallers of killed workers told after {told_s:.2f} s")
        await scene.report("workers killed", 2.0)


@pytest.mark.long
@pytest.mark.parametrize("stopped_s", [1.0, 7.0])
async def test_stopped(stack: Stack, stopped_s: float) -> None:
    """A pause is a pause. After a longer one the worker counts as lost, and what it says later reaches nobody."""
    async with staged(stack) as scene:
        records, _ = await scene.all_phases()
        scene.strike(signal.SIGSTOP, *scene.workers.values())
        scene.doomed.signal(signal.SIGCONT)
        await asyncio.sleep(stopped_s)
        for worker in scene.workers.values():
            worker.signal(signal.SIGCONT)
        await scene.ends(scene.book.records)
        assert {phase: records[phase].ending for phase in PHASES} == {
            **dict.fromkeys(BEGUN, "answered" if stopped_s < 2 else "worker_lost"),
            **dict.fromkeys(NOT_BEGUN, "answered"),
        }
        print(f"\ncallers of stopped workers at their end after {scene.last_end_s(records[p] for p in BEGUN):.2f} s")
        await scene.report(f"workers stopped for {stopped_s:g} s", 8.0)
