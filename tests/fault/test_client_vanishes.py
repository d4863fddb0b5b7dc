"""A client that vanishes while queued or streaming frees its place within 100 ms of the next step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from tests.fault.rest import at_rest
from tests.support.caller import calling
from tests.support.stack import Stack
from tests.support.waiting import until

MODEL, STEP_S = "pool", 0.02


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        running.fake_worker(MODEL, "--step-ms", "20", "--tokens", "600", worker_id="only", slots=1)
        running.gateway()
        yield running


@pytest.mark.serial
async def test_while_streaming(stack: Stack) -> None:
    async with calling(stack.gateways[0].url, stack.key, MODEL) as caller:
        async with caller.stream() as stream:
            await stream.until_text()
            assert stack.leases(MODEL) == 1
        vanished = time.monotonic()
        await until(lambda: stack.leases(MODEL) == 0, 2, "the slot is free")
        assert time.monotonic() - vanished < STEP_S + 0.1


@pytest.mark.serial
async def test_while_not_streaming(stack: Stack) -> None:
    async with calling(stack.gateways[0].url, stack.key, MODEL) as caller:
        asking = asyncio.create_task(caller.whole())
        await until(lambda: stack.leases(MODEL) == 1, 5, "the call holds the slot")
        await asyncio.sleep(0.1)
        asking.cancel()
        vanished = time.monotonic()
        await asyncio.wait([asking])
        await until(lambda: stack.leases(MODEL) == 0, 2, "the slot is free")
        assert time.monotonic() - vanished < STEP_S + 0.1


async def test_the_freed_place_serves_the_next_caller_at_once(stack: Stack) -> None:
    async with calling(stack.gateways[0].url, stack.key, MODEL) as caller:
        async with caller.stream() as first:
            await first.until_text()
            following = asyncio.create_task(caller.whole(max_tokens=3))
            await asyncio.sleep(0.3)
            assert not following.done()
        status, _ = await asyncio.wait_for(following, 2)
        assert status == 200


async def test_while_queued(stack: Stack) -> None:
    async with calling(stack.gateways[0].url, stack.key, MODEL) as caller, caller.stream() as running:
        await running.until_text()
        queued = asyncio.create_task(caller.whole())
        await asyncio.sleep(0.3)
        third = asyncio.create_task(caller.whole(max_tokens=3))
        await asyncio.sleep(0.3)
        queued.cancel()
        await asyncio.wait([queued])
        running.response.close()
        status, _ = await asyncio.wait_for(third, 2)  # the vanished one's turn did not come first
        assert status == 200
    await at_rest(stack, MODEL, within_s=2)
