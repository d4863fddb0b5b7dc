"""The lane for large bodies: one at a time, teams in turn."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial

import pytest

from gateway.api.intake.decoding import DecodingThread, let_loop_run


async def test_teams_take_turns() -> None:
    lane, order = DecodingThread(), list[str]()
    asked = [("red", n) for n in range(4)] + [("blue", 0)]
    work = [lane.run(team, partial(order.append, f"{team} {n}")) for team, n in asked]
    await asyncio.gather(*work)
    assert order == ["red 0", "red 1", "blue 0", "red 2", "red 3"]


@pytest.mark.serial
async def test_the_loop_goes_on_meanwhile() -> None:
    lane = DecodingThread()
    assert await lane.run("red", threading.get_ident) != threading.get_ident()
    working = asyncio.create_task(lane.run("red", lambda: time.sleep(0.3)))
    began, longest_s = time.monotonic(), 0.0
    while not working.done():
        before = time.monotonic()
        await asyncio.sleep(0.001)
        longest_s = max(longest_s, time.monotonic() - before)
    assert time.monotonic() - began >= 0.3
    assert longest_s < 0.25


async def test_it_rests_as_long_as_it_worked() -> None:
    lane, began = DecodingThread(), time.monotonic()
    await asyncio.gather(*(lane.run("red", lambda: time.sleep(0.1)) for _ in range(2)))
    assert time.monotonic() - began >= 0.3


async def test_a_caller_who_leaves_gives_its_turn_to_the_next() -> None:
    lane, go = DecodingThread(), threading.Event()
    first = asyncio.create_task(lane.run("red", go.wait))
    waiting = [asyncio.create_task(lane.run("red", lambda: "told")) for _ in range(3)]
    await asyncio.sleep(0.05)
    for gone in (first, waiting[0], waiting[2]):
        gone.cancel()
    go.set()
    async with asyncio.timeout(5.0):
        assert await waiting[1] == "told"
        assert await lane.run("red", lambda: "again") == "again"


async def test_what_fails_is_raised_and_the_lane_goes_on() -> None:
    lane = DecodingThread()
    with pytest.raises(ZeroDivisionError):
        await lane.run("red", lambda: 1 // 0)
    assert await lane.run("red", lambda: 5) == 5


def compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_a_long_job_lets_the_loop_run_for_as_long_as_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    rests = list[float]()
    monkeypatch.setattr("gateway.api.intake.decoding.sleep", rests.append)

    def work() -> None:
        for _ in range(3):
            compute(0.01)
            let_loop_run()
            let_loop_run()

    work()
    assert rests == [], "it is no job of the lane"
    await DecodingThread().run("red", work)
    assert len(rests) == 3, "there is nothing to rest for at once again"
    assert all(0.01 <= rest < 0.1 for rest in rests)


@pytest.mark.serial
async def test_what_a_job_rested_meanwhile_is_not_rested_for_once_more() -> None:
    lane, began = DecodingThread(), time.monotonic()

    def work() -> None:
        compute(0.1)
        let_loop_run()

    await lane.run("red", work)
    first_s = time.monotonic() - began
    await lane.run("red", lambda: None)
    assert time.monotonic() - began < 1.8 * first_s


async def test_it_goes_on_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first large body was told 500 then, and its turn was lost: every later one waited for ever."""
    lane = DecodingThread()

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    async with asyncio.timeout(5.0):
        assert [await lane.run(team, lambda: 5) for team in ("red", "blue")] == [5, 5]
