"""Ticks: work of several periods falls due together, never much later than its period, and earlier if it is woken."""

from __future__ import annotations

import asyncio
import math

import pytest

from workers.process import ticks
from workers.process.ticks import seconds_to_tick, wait_tick


class Clock:
    """Stands for the event loop; only its time is asked for."""

    at = 0.0

    def time(self) -> float:
        return self.at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: made)
    return made


def test_ticks_of_multiples_fall_together(clock: Clock) -> None:
    for number in range(1000):
        clock.at = 100 + number * 0.0137
        due = {period_s: clock.at + seconds_to_tick(period_s) for period_s in (0.2, 1.0, 2.0)}
        for at in due.values():
            past = (at + ticks._PHASE_S) % 0.2
            assert min(past, 0.2 - past) < 1e-6


def test_a_tick_is_waited_for_a_period_and_not_much_longer(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticks, "_PHASE_S", 0.0)
    for since, left in ((0.0, 1.0), (0.25, 0.75), (0.5, 0.5), (0.75, 0.25), (0.999, 1.001)):
        clock.at = 40 + since
        assert math.isclose(seconds_to_tick(1.0), left)


async def test_woken_it_waits_no_longer() -> None:
    wake = asyncio.Event()
    asyncio.get_running_loop().call_later(0.02, wake.set)
    async with asyncio.timeout(5):
        await wait_tick(60.0, wake)
    assert wake.is_set()


async def test_without_being_woken_it_waits_for_the_tick() -> None:
    loop = asyncio.get_running_loop()
    due = loop.time() + seconds_to_tick(0.1)
    await wait_tick(0.1, asyncio.Event())
    assert loop.time() > due - 0.01
