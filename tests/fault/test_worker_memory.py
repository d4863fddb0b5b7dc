"""A worker that has too little memory: callers are told nothing that is not true of their requests."""

from __future__ import annotations

import asyncio
import json
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.fault.rest import at_rest
from tests.support.caller import Caller, calling
from tests.support.stack import DEMO_MODEL, Process, Stack
from tests.support.waiting import until

MODEL = "demo"
LONG = "a story about boats and sheep " * 30
CALLS = 12
LARGE = 1_000_000
"""Characters that are no part of the prompt, and are kept as they are by whoever reads the request."""


def limit(worker: Process, share: float) -> None:
    """It may have no more than so much of what it has: nothing new."""
    pages = int(Path(f"/proc/{worker.pid}/statm").read_text().split()[0])
    most = int(pages * resource.getpagesize() * share)
    resource.prlimit(worker.pid, resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def unlimit(worker: Process) -> None:
    resource.prlimit(worker.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


async def endings(caller: Caller) -> Counter[tuple[int, str]]:
    """Of calls whose prompts fit, some of them with more to compute than a text."""
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"logprobs": True, "top_logprobs": 5},
        {"response_format": {"type": "json_object"}, "chat_template_kwargs": {"unused": "x" * LARGE}},
    )
    asked = (caller.whole(f"{n} {LONG}", max_tokens=4, **kinds[n % 3]) for n in range(CALLS))
    return Counter(
        [(status, (body.get("error") or {}).get("code", "")) for status, body in await asyncio.gather(*asked)]
    )


def num_cut(gateway: Process) -> int:
    """Answers that were told so though they had begun, by the gateway's log."""
    calls = (json.loads(line) for line in gateway.text().splitlines() if '"out_of_memory"' in line)
    return sum(call.get("completion_tokens", 0) > 0 for call in calls if call.get("message") == "request")


def drains(stack: Stack, worker_id: str) -> bool:
    beat = stack.heartbeat(MODEL, worker_id)
    return beat is not None and beat.draining


def serves(stack: Stack, worker_id: str, boot: str) -> bool:
    beat = stack.heartbeat(MODEL, worker_id)
    return beat is not None and beat.boot == boot and not beat.draining


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_a_worker_without_memory_says_so_and_is_left_alone_until_it_has_some() -> None:
    """Its callers wait for another one."""
    with Stack() as stack:
        poor = stack.worker(DEMO_MODEL, MODEL, slots=4, ctx=4096, worker_id="poor")
        gateway = stack.gateway(queue_timeout_s=60)
        async with calling(gateway.url, stack.key, MODEL) as caller:
            assert (await caller.whole(LONG, max_tokens=4))[0] == 200
            boot = stack.wait_for_worker(MODEL, "poor").boot
            limit(poor, 0.5)
            asking = asyncio.create_task(endings(caller))
            await until(lambda: drains(stack, "poor"), 20, "it is placed on no more")
            await asyncio.to_thread(stack.worker, DEMO_MODEL, MODEL, slots=4, ctx=4096, worker_id="rich")
            found = await asking
            assert set(found) <= {(200, ""), (503, "out_of_memory")}
            # An answer that has begun is not made again elsewhere.
            assert found[503, "out_of_memory"] == num_cut(gateway)
            assert found[200, ""] >= CALLS // 2
            unlimit(poor)
            await until(lambda: serves(stack, "poor", boot), 10, "the same process is placed on again")
        await at_rest(stack, MODEL)
        assert poor.popen.poll() is None
        assert "Traceback" not in gateway.text()


async def test_a_prompt_that_another_worker_has_the_context_for_goes_there() -> None:
    """One that found little memory at its start has a small one; gateways only guess how long a prompt is."""
    with Stack() as stack:
        stack.fake_worker(MODEL, "--ctx", "100", "--tokens", "8", slots=16)
        stack.fake_worker(MODEL, "--ctx", "4096", "--tokens", "8", slots=16)
        gateway = stack.gateway()
        async with calling(gateway.url, stack.key, MODEL) as caller:
            text = "x" * 440
            seen = Counter([(await caller.whole(f"{n:02d}{text}", max_tokens=4))[0] for n in range(CALLS)])
            assert seen == {200: CALLS}
            status, body = await caller.whole("x" * 20_000, max_tokens=4)
            assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        await at_rest(stack, MODEL)
