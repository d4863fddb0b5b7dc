"""Redis runs and does not answer the question: full, stuck, read-only, refusing. It counts as away, for everybody."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from gateway.admission.admission import KNOWN_AFTER_S
from tests.fault.rest import at_rest
from tests.support.busy_machine import sampled
from tests.support.caller import Caller, Stream, calling
from tests.support.redis_troubles import TROUBLES, in_trouble
from tests.support.stack import Stack
from workers.protocol import keys

MODEL = "pool"
SHORT_S, LONG_S = 1.0, 12.0
LONGEST_GAP_S = 2.0
"""Of a stream whose tokens come every 10 ms, less what the processes on its way waited for a processor meanwhile."""
TRUE_ERRORS = frozenset({"store_unavailable", "queue_timeout", "queue_full", "unavailable"})
"""What may be said of a service that has trouble of its own, by a 503 or a 429."""


@dataclass(slots=True)
class Seen:
    """What callers got meanwhile."""

    endings: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def note(self, what: str, status: int, body: Any) -> None:
        code = (body.get("error") or {}).get("code", "") if isinstance(body, dict) else ""
        self.endings[f"{what}: {status} {code}".strip()] += 1
        if status != 200 and (status not in (429, 503) or code not in TRUE_ERRORS):
            self.wrong.append(f"{what}: {status} {body}")


async def chat(caller: Caller, seen: Seen) -> None:
    status, body = await caller.whole(max_tokens=5)
    seen.note("chat", status, body)


async def resumable(caller: Caller, seen: Seen) -> None:
    body = caller.body(max_tokens=5, stream=True)
    headers = {"x-resume-grace": "5"}
    async with caller.session.post(f"{caller.url}/v1/chat/completions", json=body, headers=headers) as response:
        text = await response.text()
        seen.note("resumable", response.status, {} if response.status == 200 else await response.json())
        if response.status == 200 and "[DONE]" not in text:
            seen.wrong.append(f"resumable: {text[-300:]}")


async def stored(caller: Caller, seen: Seen) -> None:
    """What needs storage says that there is none; what only would like it goes without."""
    for more in ({}, {"previous_response_id": "resp_none"}, {"background": True}):
        body = {"model": MODEL, "input": "Hello", "max_output_tokens": 5, **more}
        async with caller.session.post(f"{caller.url}/v1/responses", json=body) as response:
            answer = await response.json()
        if "previous_response_id" in more and response.status == 400:
            continue  # Redis has answered: there is none of that name
        seen.note(f"response {sorted(more)}", response.status, answer)


ASKED = (
    "/v1/models",
    "/lora-adapters",
    "/props",
    f"/admin/explain?model={MODEL}",
    "/ready",
    "/health",
    "/metrics",
)


async def question(caller: Caller, seen: Seen, path: str) -> None:
    async with caller.session.get(f"{caller.url}{path}", params={} if "?" in path else {"model": MODEL}) as response:
        body = await response.json() if "json" in response.content_type else {}
        seen.note(path, response.status, body)


async def call_until(caller: Caller, seen: Seen, over: asyncio.Event) -> None:
    """Everything that has to do with Redis, again and again."""
    while not over.is_set():
        await asyncio.gather(
            *(chat(caller, seen) for _ in range(3)),
            resumable(caller, seen),
            stored(caller, seen),
            *(question(caller, seen, path) for path in ASKED),
        )
        await asyncio.sleep(0.02)


@asynccontextmanager
async def beside(caller: Caller, pids: Sequence[int]) -> AsyncIterator[Stream]:
    """A stream that runs meanwhile, read to its end; its longest gap is looked at. `pids`: processes on its way."""
    async with sampled(pids) as waits, caller.stream(max_tokens=100_000) as stream:
        await stream.until_text()
        reading = asyncio.create_task(stream.finish())
        yield stream
        reading.cancel()
        await asyncio.wait([reading])
        waits.sample(pids)
        gaps = [(begin, end, end - begin) for begin, end in pairwise(stream.arrived)]
        assert stream.error is None
        assert not stream.done
        own = [gap - waits.between(begin, end) if gap >= LONGEST_GAP_S else gap for begin, end, gap in gaps]
        assert max(own) < LONGEST_GAP_S


async def strike(stack: Stack, callers: list[Caller], name: str, lasts_s: float) -> Seen:
    """What two gateways' callers get while Redis is in trouble, and that all is whole afterwards."""
    seen, over = Seen(), asyncio.Event()
    pids = [os.getpid(), *(process.pid for process in (*stack.gateways, *stack.workers))]
    async with beside(callers[0], pids), beside(callers[1], pids):
        with in_trouble(name, stack.redis, MODEL):
            asking = [asyncio.create_task(call_until(caller, seen, over)) for caller in callers]
            await asyncio.sleep(lasts_s)
            if name not in ("NOSCRIPT", "LOADING"):
                async with callers[0].session.get(f"{callers[0].url}/ready") as response:
                    assert (response.status, (await response.json())["status"]) == (200, "degraded")
        over.set()
        await asyncio.gather(*asking)
    print(f"\n{name}: {dict(sorted(seen.endings.items()))}")
    assert not seen.wrong, seen.wrong[:3]
    assert seen.endings["chat: 200"] > 0
    await at_rest(stack, MODEL, within_s=15)
    for gateway in stack.gateways:
        assert gateway.popen.poll() is None
        assert "Traceback" not in gateway.text()
    return seen


@asynccontextmanager
async def fleet() -> AsyncIterator[tuple[Stack, list[Caller]]]:
    """Two gateways that know their shares, and a worker with slots for all."""
    with Stack() as stack:
        stack.fake_worker(MODEL, "--step-ms", "10", "--tokens", "1000000", "--ctx", "1000000", slots=64)
        gateways = [stack.gateway(queue_timeout_s=5), stack.gateway(queue_timeout_s=5)]
        await asyncio.sleep(KNOWN_AFTER_S + 2 * keys.GATEWAY_INTERVAL_S)
        urls = [(gateway.url, stack.key, MODEL) for gateway in gateways]
        async with calling(*urls[0]) as one, calling(*urls[1]) as other:
            yield stack, [one, other]


async def recovered(callers: list[Caller]) -> None:
    """`/ready` says so, of both."""
    async with asyncio.timeout(15):
        for caller in callers:
            while True:
                async with caller.session.get(f"{caller.url}/ready") as response:
                    if response.status == 200 and (await response.json())["status"] == "ready":
                        break
                await asyncio.sleep(0.05)


async def test_it_counts_as_away() -> None:
    async with fleet() as (stack, callers):
        for name in ("BUSY", "MISCONF"):
            await strike(stack, callers, name, SHORT_S)
            await recovered(callers)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TROUBLES)
async def test_it_counts_as_away_however_long_it_lasts(name: str) -> None:
    async with fleet() as (stack, callers):
        await strike(stack, callers, name, LONG_S)
        await recovered(callers)
