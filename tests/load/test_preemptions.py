"""A true engine with a third of the KV cells that its slots could fill: what is leased fits, so few are put off."""

from __future__ import annotations

import asyncio
import random
import urllib.request
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.caller import Caller, calling
from tests.support.stack import DEMO_MODEL, Process, Stack
from tests.support.waiting import until

MODEL = "tight"
SLOTS, CTX, KV_TOKENS = 8, 256, 700
NUM_CALLS, NUM_CALLERS = 200, 16
MAX_RATE = 0.01


def sample(worker: Process, name: str) -> float:
    with urllib.request.urlopen(f"{worker.url}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


async def call_on(caller: Caller, numbers: Iterator[int], chance: random.Random, endings: Counter[str]) -> None:
    """Prompts of 20 to 130 tokens; answers as long as the model likes, or as long as was asked for."""
    for number in numbers:
        prompt = f"{number}: " + " ".join(str(chance.randrange(10_000)) for _ in range(chance.randrange(2, 24)))
        to_the_end = {"ignore_eos": True} if chance.random() < 0.5 else {}
        status, body = await caller.whole(prompt, max_tokens=chance.randrange(10, 100), **to_the_end)
        endings[str(status) if status == 200 else body["error"]["code"]] += 1


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_hardly_a_call_gives_its_cells_up(stack: Stack) -> None:
    worker = stack.worker(DEMO_MODEL, MODEL, slots=SLOTS, ctx=CTX, kv_tokens=KV_TOKENS)
    gateway = stack.gateway(queue_timeout_s=300)
    numbers, endings = iter(range(NUM_CALLS)), Counter[str]()
    async with calling(gateway.url, stack.key, MODEL) as caller:
        callers = [call_on(caller, numbers, random.Random(seed), endings) for seed in range(NUM_CALLERS)]
        await asyncio.gather(*callers)
    preempted = sample(worker, "vllm:num_preemptions_total")
    busy = sample(worker, "llamacpp:n_busy_slots_per_decode")
    print(f"\n{NUM_CALLS} calls, {dict(endings)}: {preempted:.0f} preemptions, {busy:.1f} of {SLOTS} slots busy")
    assert endings == {"200": NUM_CALLS}
    assert preempted <= MAX_RATE * NUM_CALLS
    await until(lambda: stack.leases(MODEL) == 0, 3, "nothing stays leased")


@pytest.fixture
def stack() -> Iterator[Stack]:
    with Stack() as running:
        yield running
