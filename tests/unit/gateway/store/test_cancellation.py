"""A loop that lost its cancellation inside the Redis client notices in its next round."""

from __future__ import annotations

import asyncio

import pytest

from gateway.store.outage import raise_if_cancelled


async def deaf_loop(rounds: list[int]) -> None:
    while True:
        try:
            await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            rounds.append(-1)  # as asyncio.wait_for did before Python 3.12
        rounds.append(1)
        raise_if_cancelled()


async def test_a_lost_cancellation_is_found_again() -> None:
    rounds: list[int] = []
    task = asyncio.create_task(deaf_loop(rounds))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 1.0)
    assert rounds[-2:] == [-1, 1]


async def test_it_is_silent_otherwise() -> None:
    raise_if_cancelled()
    async with asyncio.timeout(1.0):
        await asyncio.sleep(0)
        raise_if_cancelled()
