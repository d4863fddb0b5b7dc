"""Failed authentication is slowed by address, within bounds, and nothing else is."""

from __future__ import annotations

import asyncio
import time
import tracemalloc

import pytest

from gateway.access import brakes
from gateway.access.brakes import (
    FORGIVEN_S,
    LONGEST_DELAY_S,
    MAX_ADDRESSES,
    MAX_DELAYED_PER_ADDRESS,
    MAX_FAILURES,
    NUM_FREE,
    Brakes,
)
from gateway.errors import TooManyFailures


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(brakes, "monotonic", lambda: now[0])
    return now


def test_delays_grow_to_a_bound_and_are_forgotten(clock: list[float]) -> None:
    slow = Brakes()
    delays = [slow.failed("192.0.2.7") for _ in range(MAX_FAILURES + 5)]
    assert delays[:NUM_FREE] == [0.0] * NUM_FREE
    assert delays[NUM_FREE : NUM_FREE + 4] == [0.1, 0.2, 0.4, 0.8]
    assert set(delays[NUM_FREE + 5 :]) == {LONGEST_DELAY_S}
    assert slow.failed("192.0.2.8") == 0.0
    clock[0] += FORGIVEN_S * (MAX_FAILURES - NUM_FREE + 1)
    assert slow.failed("192.0.2.7") == 0.0
    clock[0] += FORGIVEN_S * MAX_FAILURES
    assert slow.failed("192.0.2.9") == 0.0
    assert len(slow) == 1, "the others are forgotten"


def test_addresses_of_one_network_count_together(clock: list[float]) -> None:
    slow = Brakes()
    for host in range(NUM_FREE):
        slow.failed(f"2001:db8::{host}")
    assert slow.failed("2001:db8::ffff") > 0
    assert slow.failed("2001:db8:0:1::1") == 0
    for _ in range(NUM_FREE):
        slow.failed("::ffff:192.0.2.1")
    assert slow.failed("192.0.2.1") > 0
    assert slow.failed("") == 0


async def test_only_so_many_wait_at_once() -> None:
    slow = Brakes(max_delayed=MAX_DELAYED_PER_ADDRESS + 1)
    waiting = [asyncio.create_task(slow.delay("192.0.2.7", 60.0)) for _ in range(MAX_DELAYED_PER_ADDRESS)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyFailures) as caught:
        await slow.delay("192.0.2.7", 60.0)
    assert caught.value.status == 429
    assert caught.value.retry_after_s == LONGEST_DELAY_S
    waiting.append(asyncio.create_task(slow.delay("192.0.2.8", 60.0)))
    await asyncio.sleep(0)
    with pytest.raises(TooManyFailures):
        await slow.delay("192.0.2.9", 60.0)
    assert slow.num_delayed == MAX_DELAYED_PER_ADDRESS + 1
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert slow.num_delayed == 0
    await slow.delay("192.0.2.7", 0.0)


def test_any_number_of_addresses_takes_so_much_memory_and_time(clock: list[float]) -> None:
    slow = Brakes()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(MAX_ADDRESSES):
            slow.failed(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(slow) == MAX_ADDRESSES
    assert taken < 48 << 20
    begun = time.thread_time()
    for number in range(10_000):
        slow.failed(f"11.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert time.thread_time() - begun < 0.5
    assert len(slow) == MAX_ADDRESSES
