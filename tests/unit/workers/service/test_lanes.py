"""The lane: teams in turn, bounds of what waits, jobs whose callers left."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator

import pytest

from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.service.calls.lanes import FairLane, LaneBounds, prompts_at_once


class Gate:
    """Jobs that last until they are let go, and the order in which they began."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.began: list[str] = []

    def job(self, name: str) -> str:
        self.began.append(name)
        assert self.open.wait(20)
        return name


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


async def settled(lane: FairLane, *, running: int, waiting: int) -> None:
    async with asyncio.timeout(10):
        while (lane.num_running, lane.num_waiting) != (running, waiting):  # noqa: ASYNC110 - a lane tells nobody
            await asyncio.sleep(0.005)


async def begun(gate: Gate, *names: str) -> None:
    """Wait for the threads of jobs that run."""
    async with asyncio.timeout(10):
        while len(gate.began) < len(names):  # noqa: ASYNC110 - a thread tells nobody
            await asyncio.sleep(0.005)
    assert gate.began == [*names]


def begin(lane: FairLane, gate: Gate, team: str, name: str, num_bytes: int = 0) -> asyncio.Task[str]:
    return asyncio.create_task(lane.run(team, num_bytes, gate.job, name))


async def test_what_a_job_returns_and_raises() -> None:
    lane = FairLane("counting", at_once=2)
    assert await lane.run("a", 0, int, "12") == 12
    with pytest.raises(ValueError, match="invalid literal"):
        await lane.run("a", 0, int, "x")
    assert (lane.num_running, lane.num_waiting) == (0, 0)
    lane.close()


class Asked:
    """A request of many bytes."""


def refuse(_: Asked) -> None:
    raise CallFailed(Failure(FailureCode.CONTEXT_OVERFLOW, "too long"))


async def test_a_job_that_failed_keeps_nothing_of_its_request() -> None:
    """Prompts of 6 MiB that were refused lay there until the collector of cycles came by: 100 MiB after a minute."""
    lane, asked = FairLane("counting", at_once=1), Asked()
    known = weakref.ref(asked)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(CallFailed):
            await lane.run("a", 0, refuse, asked)
        del asked
        await settled(lane, running=0, waiting=0)
        await asyncio.sleep(0.05)  # the thread forgets its last job
        assert known() is None
    finally:
        gc.enable()
        lane.close()


async def test_teams_take_turns_whatever_their_crowds(gate: Gate) -> None:
    lane = FairLane("counting", at_once=1)
    tasks = [begin(lane, gate, "crowd", f"crowd{number}") for number in range(6)]
    await settled(lane, running=1, waiting=5)
    tasks += [begin(lane, gate, "one", "one0"), begin(lane, gate, "one", "one1"), begin(lane, gate, "two", "two0")]
    await settled(lane, running=1, waiting=8)
    gate.open.set()
    await asyncio.gather(*tasks)
    assert gate.began[:6] == ["crowd0", "crowd1", "one0", "two0", "crowd2", "one1"]
    assert gate.began[6:] == ["crowd3", "crowd4", "crowd5"]


async def test_a_team_never_has_every_thread(gate: Gate) -> None:
    lane = FairLane("counting", at_once=3)
    crowd = [begin(lane, gate, "crowd", "crowd") for _ in range(10)]
    await settled(lane, running=2, waiting=8)
    other = begin(lane, gate, "other", "other")
    await settled(lane, running=3, waiting=8)
    await begun(gate, "crowd", "crowd", "other")
    gate.open.set()
    await asyncio.gather(other, *crowd)


async def test_a_job_whose_caller_left_never_runs(gate: Gate) -> None:
    lane = FairLane("counting", at_once=1)
    first = begin(lane, gate, "a", "first")
    left, stays = begin(lane, gate, "a", "left"), begin(lane, gate, "a", "stays")
    await settled(lane, running=1, waiting=2)
    left.cancel()
    await settled(lane, running=1, waiting=1)
    gate.open.set()
    assert [await first, await stays] == ["first", "stays"]
    assert gate.began == ["first", "stays"]
    assert left.cancelled()


async def test_a_running_job_keeps_its_place_when_its_caller_leaves(gate: Gate) -> None:
    lane = FairLane("counting", at_once=1)
    first = begin(lane, gate, "a", "first")
    second = begin(lane, gate, "b", "second")
    await settled(lane, running=1, waiting=1)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (lane.num_running, lane.num_waiting) == (1, 1)
    await begun(gate, "first")
    gate.open.set()
    assert await second == "second"


async def test_callers_that_leave_as_their_turn_comes(gate: Gate) -> None:
    lane = FairLane("counting", at_once=1)
    first = begin(lane, gate, "a", "first")
    others = [begin(lane, gate, f"{number % 3}", "other") for number in range(30)]
    await settled(lane, running=1, waiting=30)
    gate.open.set()
    await first
    for number, other in enumerate(others):
        if number % 2:
            other.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(*others, return_exceptions=True)
    await settled(lane, running=0, waiting=0)
    assert await lane.run("a", 0, int, "1") == 1


async def test_what_waits_is_bounded_per_team_and_in_all(gate: Gate) -> None:
    lane = FairLane("counting", at_once=1, bounds=LaneBounds(jobs_per_team=2, jobs=3))
    tasks = [begin(lane, gate, "crowd", "crowd") for _ in range(3)]
    await settled(lane, running=1, waiting=2)
    with pytest.raises(CallFailed) as refused:
        await lane.run("crowd", 0, gate.job, "refused")
    assert refused.value.failure.code is FailureCode.BUSY
    assert "2 requests of your team" in refused.value.failure.message
    assert "send fewer at once" in refused.value.failure.message
    tasks.append(begin(lane, gate, "other", "other"))
    await settled(lane, running=1, waiting=3)
    with pytest.raises(CallFailed, match="3 requests wait for counting"):
        await lane.run("third", 0, gate.job, "refused")
    gate.open.set()
    await asyncio.gather(*tasks)
    assert "refused" not in gate.began


async def test_the_memory_of_what_waits_is_bounded(gate: Gate) -> None:
    lane = FairLane("counting", at_once=1, bounds=LaneBounds(bytes_per_team=2 << 20, bytes=3 << 20))
    tasks = [begin(lane, gate, "a", "a"), begin(lane, gate, "a", "a", 2 << 20)]
    await settled(lane, running=1, waiting=1)
    with pytest.raises(CallFailed, match="of your team with 2 MiB"):
        await lane.run("a", 1, gate.job, "refused")
    with pytest.raises(CallFailed, match="3 MiB, may"):
        await lane.run("b", (1 << 20) + 1, gate.job, "refused")
    gate.open.set()
    await asyncio.gather(*tasks)


async def test_waiting_ends(gate: Gate) -> None:
    lane = FairLane("counting", at_once=1, bounds=LaneBounds(wait_s=0.05))
    first = begin(lane, gate, "a", "first")
    await settled(lane, running=1, waiting=0)
    start = time.monotonic()
    with pytest.raises(CallFailed, match=r"within 0\.05 s") as refused:
        await lane.run("b", 0, gate.job, "late")
    assert time.monotonic() - start < 10
    assert refused.value.failure.code is FailureCode.BUSY
    gate.open.set()
    await first
    assert gate.began == ["first"]


async def test_a_closed_lane_refuses_and_counts_right() -> None:
    lane = FairLane("counting", at_once=1)
    lane.close()
    with pytest.raises(RuntimeError):
        await lane.run("a", 0, int, "1")
    assert lane.num_running == 0


def test_as_many_prompts_at_a_time_as_cores_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, at_once in ((1, 2), (2, 2), (8, 4), (64, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)), raising=False)
        assert prompts_at_once() == at_once
