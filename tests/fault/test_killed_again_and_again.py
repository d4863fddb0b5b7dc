"""Two gateways, 2,000 calls, and every five seconds a worker is killed: what each caller got, to the token."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.fault.book import Book, keeping_book
from tests.fault.rest import at_rest
from tests.support.stack import Process, Stack
from workers.protocol import keys

MODEL = "pool"
NUM_CALLS, NUM_CALLERS = 2000, 48
NUM_WORKERS, SLOTS = 4, 8
KILL_EVERY_S = 5.0
STEP_MS, FEWEST, MOST = 20, 20, 80
"""Of a call's tokens: a second on average."""


@dataclass(slots=True)
class Herd:
    """Workers of one pool, each with an id that its successors take over."""

    stack: Stack
    living: dict[str, Process] = field(default_factory=dict)
    tallies: list[Path] = field(default_factory=list)
    killed: set[str] = field(default_factory=set)

    def start(self, id: str) -> None:
        name = f"{id}-{len(self.tallies)}"
        self.tallies.append(self.stack.folder / f"{name}.tally")
        flags = ("--step-ms", str(STEP_MS), "--tokens", "5000", "--tally", str(self.tallies[-1]))
        worker = self.stack.fake_worker(MODEL, *flags, worker_id=id, slots=SLOTS, wait=False)
        worker.name = name
        self.living[id] = worker

    async def kill_one_after_another(self, over: asyncio.Event) -> None:
        for id in itertools.cycle(sorted(self.living)):
            try:
                await asyncio.wait_for(over.wait(), KILL_EVERY_S)
            except TimeoutError:
                self.killed.add(self.living[id].name)
                self.living[id].signal(signal.SIGKILL)
                self.start(id)
            else:
                return


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_no_call_is_lost_and_no_token_doubled(stack: Stack) -> None:
    herd = Herd(stack)
    for number in range(NUM_WORKERS):
        herd.start(f"w{number}")
    gateways = [stack.gateway(wait=False) for _ in range(2)]
    for id in herd.living:
        stack.wait_for_worker(MODEL, id)
    for gateway in gateways:
        stack.wait_until_ready(gateway)
    began, over = time.monotonic(), asyncio.Event()
    async with keeping_book(stack.key) as book:
        killing = asyncio.create_task(herd.kill_one_after_another(over))
        numbers = iter(range(NUM_CALLS))
        await asyncio.gather(*(call_on(book, gateways[n % 2], numbers, n) for n in range(NUM_CALLERS)))
        took_s = time.monotonic() - began
        over.set()
        await killing
        rest_s = await at_rest(stack, MODEL, within_s=keys.LEASE_TTL_S)
        figures = book.check(gateways, herd.tallies, frozenset(herd.killed))
    endings = book.endings()
    assert len(book.records) == NUM_CALLS
    assert set(endings) <= {"answered", "worker_lost"}, endings
    assert len(herd.killed) >= 5
    # A killed worker holds at most its slots' calls: no other caller is told of an error.
    assert endings["worker_lost"] <= len(herd.killed) * SLOTS
    print(
        f"\n{NUM_CALLS} calls in {took_s:.0f} s, {len(herd.killed)} workers killed: {dict(endings)}; "
        f"{figures.words} tokens came, each once, {figures.made} were made; leases gone after {rest_s:.2f} s"
    )


async def call_on(book: Book, gateway: Process, numbers: Iterator[int], seed: int) -> None:
    """One caller after another until all calls are made."""
    chance = random.Random(seed)
    for _ in numbers:
        await book.ask(gateway, MODEL, chance.randint(FEWEST, MOST)).end()
