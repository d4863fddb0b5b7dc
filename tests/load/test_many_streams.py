"""200 streams at once through one gateway process on two 8-slot workers: all finish, none is lost, nothing is left."""

from __future__ import annotations

import asyncio

from tests.support.caller import Caller, calling
from tests.support.stack import DEMO_MODEL, Stack
from tests.support.waiting import until

STREAMS, TOKENS = 200, 24


async def one(caller: Caller, number: int) -> tuple[bool, int]:
    async with caller.stream(f"What is {number} plus 4?", max_tokens=TOKENS, ignore_eos=True) as stream:
        await stream.finish()
    return stream.done and stream.error is None, (stream.usage or {}).get("completion_tokens", 0)


async def test_all_finish() -> None:
    with Stack() as stack:
        for _ in range(2):
            stack.worker(DEMO_MODEL, "bench", slots=8)
        gateway = stack.gateway()
        async with calling(gateway.url, stack.key, "bench") as caller:
            results = await asyncio.gather(*(one(caller, number) for number in range(STREAMS)))
        assert results == [(True, TOKENS)] * STREAMS
        await until(lambda: stack.leases("bench") == 0, 3, "nothing stays leased")
