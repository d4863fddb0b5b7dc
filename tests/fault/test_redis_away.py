"""Redis is gone for a while, under two gateways and two workers with calls running and calls coming."""

from __future__ import annotations

import asyncio
import urllib.request
from collections import Counter
from typing import Any

import pytest

from gateway.admission.admission import KNOWN_AFTER_S
from gateway.store.client import connect
from gateway.store.integrity import check_integrity
from tests.fault.rest import at_rest
from tests.support.caller import Caller, calling
from tests.support.stack import Process, Stack
from tests.support.waiting import until
from workers.protocol import keys

MODEL = "pool"
SLOTS = 3
CALLS = 10


def calls_of(worker: Process) -> int:
    """Those that it runs, and those that it lets wait until it has a slot for them."""
    with urllib.request.urlopen(f"{worker.url}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    counts = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(counts))


async def ready(caller: Caller) -> tuple[int, dict[str, Any]]:
    async with caller.session.get(f"{caller.url}/ready") as response:
        return response.status, await response.json()


async def watch(workers: list[Process], most: Counter[str]) -> None:
    """Keeps the largest number of calls that each worker had at once."""
    while True:
        for worker in workers:
            most[worker.name] = max(most[worker.name], await asyncio.to_thread(calls_of, worker))
        await asyncio.sleep(0.02)


@pytest.mark.long
async def test_calls_go_on_without_redis_and_no_slot_is_used_twice() -> None:
    with Stack() as stack:
        flags = ("--step-ms", "10", "--tokens", "1000")
        workers = [stack.fake_worker(MODEL, *flags, slots=SLOTS) for _ in range(2)]
        gateways = [stack.gateway(), stack.gateway()]
        await asyncio.sleep(KNOWN_AFTER_S + 2 * keys.GATEWAY_INTERVAL_S)
        most = Counter[str]()
        watching = asyncio.create_task(watch(workers, most))
        async with (
            calling(gateways[0].url, stack.key, MODEL) as one,
            calling(gateways[1].url, stack.key, MODEL) as other,
            one.stream(max_tokens=600) as first,
            other.stream(max_tokens=600) as second,
        ):
            await asyncio.gather(first.until_text(), second.until_text())
            await asyncio.to_thread(stack.redis.kill)
            for caller in (one, other):
                status, body = await ready(caller)
                assert (status, body["status"], body["without_redis"]) == (200, "degraded", [MODEL])
            answers = await asyncio.gather(
                *(caller.whole(max_tokens=40) for caller in (one, other) for _ in range(CALLS))
            )
            assert Counter(status for status, _ in answers) == {200: 2 * CALLS}
            assert set(most.values()) == {SLOTS}, "all slots are used, and none twice"

            more = [asyncio.create_task(caller.whole(max_tokens=200)) for caller in (one, other) for _ in range(CALLS)]
            await asyncio.sleep(0.5)
            await asyncio.to_thread(stack.redis.start)
            together = asyncio.create_task(asyncio.to_thread(stack.wait_until_ready, gateways[0]))
            await together
            for gateway in gateways:
                await until(lambda g=gateway: "requests for model pool again" in g.text(), 6, "back")  # type: ignore[misc]
            async with connect(stack.redis.url) as client:
                for _ in range(20):
                    await check_integrity(client, MODEL)
                    await asyncio.sleep(0.05)
            assert {status for status, _ in await asyncio.gather(*more)} == {200}
            await asyncio.gather(first.finish(), second.finish())
            for stream in (first, second):
                assert stream.error is None
                assert stream.usage is not None
                assert stream.usage["completion_tokens"] == 600
            for caller in (one, other):
                status, body = await ready(caller)
                assert (status, body["status"]) == (200, "ready")
            await at_rest(stack, MODEL, within_s=8)
        watching.cancel()
        assert set(most.values()) == {SLOTS}
