"""Redis loses all its data while it runs (FLUSHALL): what was known a second ago is not unknown to any caller."""

from __future__ import annotations

import asyncio
from collections import Counter

import redis

from tests.fault.rest import at_rest
from tests.support.caller import Caller, calling
from tests.support.stack import Stack

MODELS = ("one", "other")
FLUSHES, BETWEEN_S = 2, 0.8


async def call_until(caller: Caller, seen: Counter[tuple[int, str]], over: asyncio.Event) -> None:
    while not over.is_set():
        status, body = await caller.whole(max_tokens=3)
        seen[status, (body.get("error") or {}).get("code", "")] += 1
        async with caller.session.get(f"{caller.url}/v1/models/{caller.model}") as response:
            seen[response.status, ""] += 1


async def test_nobody_is_told_that_there_is_no_such_model() -> None:
    with Stack() as stack:
        for model in MODELS:
            stack.fake_worker(model, "--step-ms", "5", "--tokens", "100000", "--ctx", "1000000")
        gateway = stack.gateway(queue_timeout_s=10)
        async with (
            calling(gateway.url, stack.key, MODELS[0]) as one,
            calling(gateway.url, stack.key, MODELS[1]) as other,
            one.stream(max_tokens=100_000) as stream,
        ):
            await stream.until_text()
            reading = asyncio.create_task(stream.finish())
            seen, over = Counter[tuple[int, str]](), asyncio.Event()
            asking = [asyncio.create_task(call_until(caller, seen, over)) for caller in (one, other) for _ in range(4)]
            with redis.Redis(unix_socket_path=str(stack.redis.socket)) as client:
                for _ in range(FLUSHES):
                    await asyncio.sleep(BETWEEN_S)
                    client.flushall()
            await asyncio.sleep(BETWEEN_S)
            over.set()
            await asyncio.gather(*asking)
            print(f"\n{dict(seen)}")
            assert set(seen) == {(200, "")}
            assert not reading.done()
            reading.cancel()
            await asyncio.wait([reading])
            assert max(b - a for a, b in zip(stream.arrived, stream.arrived[1:], strict=False)) < 2.0
        await at_rest(stack, *MODELS, within_s=15)
