"""One team that wants every slot, with a true engine: the calls of another one are answered beside it."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from accounts.protocol.records import digest
from gateway.store.client import connect
from gateway.store.integrity import check_integrity
from tests.support.caller import Caller, calling
from tests.support.stack import DEMO_MODEL, Process, Stack
from tests.support.waiting import until

MODEL, SLOTS, CTX = "demo", 4, 4096
QUEUE_TIMEOUT_S = 10.0
RED, BLUE = "pk-red-0123456789abcdef", "pk-blue-0123456789abcdef"
GREEN = "pk-green-0123456789abcdef"
KEYS = [{"name": team, "team": team, "sha256": digest(key)} for team, key in (("red", RED), ("blue", BLUE))]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        running.worker(DEMO_MODEL, MODEL, worker_id="demo-a", slots=SLOTS, ctx=CTX)
        running.gateway(api_keys=json.dumps(KEYS), queue_timeout_s=QUEUE_TIMEOUT_S)
        yield running


@asynccontextmanager
async def everything_taken(red: Caller, stack: Stack) -> AsyncIterator[None]:
    """Answers without end, of the team red, on all slots; another one follows each that ends all the same."""

    async def ask() -> None:
        while True:
            await red.whole(ignore_eos=True, n=SLOTS)

    asking = asyncio.create_task(ask())
    try:
        await until(lambda: stack.leases(MODEL) >= SLOTS, 10.0, "every slot is taken")
        yield
        assert not asking.done(), asking
    finally:
        asking.cancel()
        await asyncio.wait({asking})


async def answered(blue: Caller, count: int) -> list[float]:
    """The seconds that each of so many calls at once took; all are answered."""

    async def one(number: int) -> float:
        began = time.monotonic()
        status, body = await blue.whole(f"{number}: tell me of a dog.", max_tokens=5)
        assert status == 200, body
        return time.monotonic() - began

    return await asyncio.gather(*(one(number) for number in range(count)))


def sample(worker: Process, name: str) -> float:
    with urllib.request.urlopen(f"{worker.url}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


async def whole(stack: Stack) -> None:
    await until(lambda: stack.leases(MODEL) == 0, 5.0, "nothing stays leased")
    async with connect(stack.redis.url) as redis:
        await check_integrity(redis, MODEL)


async def test_one_request_for_answers_without_end_leaves_others_their_share(stack: Stack) -> None:
    """`n` = slots, `ignore_eos`, no `max_tokens`: other teams got 503 until these answers ended."""
    url = stack.gateways[0].url
    async with calling(url, RED, MODEL) as red, calling(url, BLUE, MODEL) as blue, everything_taken(red, stack):
        took = await answered(blue, 8)
        again = await answered(blue, 1)
    print(f"\neight calls at once: {max(took):.2f} s at most, one alone {again[0]:.2f} s")
    assert max(took) < QUEUE_TIMEOUT_S
    await whole(stack)


async def test_what_gave_way_is_answered_whole(stack: Stack) -> None:
    """The greedy answers that were put off are what one alone would have been."""
    url, worker = stack.gateways[0].url, stack.workers[0]
    asked = {"ignore_eos": True, "max_tokens": 500, "temperature": 0, "speculative.n_max": 0}  # drafts make it short
    async with calling(url, RED, MODEL) as red, calling(url, BLUE, MODEL) as blue:
        _, alone = await red.whole("A boat", **asked)
        sliced = sample(worker, "paddock_slices_total")
        beside = asyncio.create_task(red.whole("A boat", n=SLOTS, **asked))
        await until(lambda: stack.leases(MODEL) >= SLOTS, 10.0, "every slot is taken")
        await answered(blue, 8)
        _, put_off = await beside
        assert sample(worker, "paddock_slices_total") > sliced
    texts = {choice["message"]["content"] for choice in put_off["choices"]}
    assert texts == {alone["choices"][0]["message"]["content"]}
    assert put_off["usage"]["completion_tokens"] == SLOTS * 500
    await whole(stack)


async def test_a_slot_is_shared_by_more_teams_than_two() -> None:
    """One slot, two teams whose answers have no end: a third one is answered."""
    with Stack() as stack:
        stack.worker(DEMO_MODEL, MODEL, worker_id="demo-a", slots=1, ctx=CTX)
        greens = {"name": "green", "team": "green", "sha256": digest(GREEN)}
        gateway = stack.gateway(api_keys=json.dumps([*KEYS, greens]), queue_timeout_s=QUEUE_TIMEOUT_S)
        async with (
            calling(gateway.url, RED, MODEL) as red,
            calling(gateway.url, BLUE, MODEL) as blue,
            calling(gateway.url, GREEN, MODEL) as green,
        ):
            endless = [asyncio.create_task(one.whole(ignore_eos=True)) for one in (red, blue)]
            await until(lambda: stack.leases(MODEL) == 2, 10.0, "the second team has a loan")
            took = await answered(green, 2)
            assert not all(task.done() for task in endless)
            for task in endless:
                task.cancel()
            await asyncio.wait(endless)
        print(f"\nanswered beside two teams in {max(took):.2f} s")
        await whole(stack)
