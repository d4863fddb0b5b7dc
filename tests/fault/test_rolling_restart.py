"""Every gateway and every worker is replaced under load, one after another: no call is refused and none breaks off.

Processes stand in for pods. Each is replaced as Kubernetes does it: its successor starts and is ready, then its preStop
hook runs (`/health/drain`, which waits), then it gets SIGTERM. Callers know one address, behind which are those
gateways that say that they are ready, some time after they say so.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from tests.fault.rest import at_rest
from tests.support.service import Service, serving
from tests.support.stack import DEMO_MODEL, Process, Stack
from tests.support.worker_access import drain_headers_of
from workers.protocol.control import gateway_drain_token
from workers.protocol.exits import Exit

MODEL = "toy"
SETTLE_S = 1.0
"""Longer than the service takes to hear of a gateway that is not ready any more."""
PATIENCE_S = 60.0
SLOTS = 4


@dataclass(slots=True)
class Load:
    """Callers who ask again and again, half of them for streams; each keeps its connections as clients do."""

    service: Service
    key: str
    answers: Counter[str] = field(default_factory=Counter)
    troubles: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    """From a request to the end of its answer."""
    over: bool = False

    async def ask_again_and_again(self, number: int) -> None:
        dice = random.Random(number)
        headers = {"Authorization": f"Bearer {self.key}"}
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        # aiohttp asks again by itself where a connection that was kept turns out to be closed; here that is a trouble.
        async with aiohttp.ClientSession(self.service.url, headers=headers, timeout=timeout) as session:
            session._retry_connection = False
            while not self.over:
                began = time.monotonic()
                kind = "stream" if number % 2 else "whole"
                try:
                    tokens = dice.choice((2, 20, 80))
                    await (self._stream if number % 2 else self._whole)(session, tokens, dice.random())
                    self.answers[kind] += 1
                except (aiohttp.ClientError, TimeoutError, OSError, AssertionError) as error:
                    self.troubles.append(f"{kind} of caller {number}: {type(error).__name__}: {error}")
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                await asyncio.sleep(dice.choice((0.05, 0.2, 0.5)))

    async def _whole(self, session: aiohttp.ClientSession, tokens: int, salt: float) -> None:
        async with session.post("/v1/chat/completions", json=_body(tokens, salt)) as response:
            answer = await response.json()
            assert response.status == 200, answer
            assert answer["usage"]["completion_tokens"] == tokens, answer

    async def _stream(self, session: aiohttp.ClientSession, tokens: int, salt: float) -> None:
        body = {**_body(tokens, salt), "stream": True, "stream_options": {"include_usage": True}}
        done, usage = False, 0
        async with session.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    usage = (chunk.get("usage") or {}).get("completion_tokens", usage)
                done = done or line.startswith(b"data: [DONE]")
        assert done, "the stream ended early"
        assert usage == tokens


def _body(tokens: int, salt: float) -> dict[str, Any]:
    prompt = f"Tell me story number {salt}."
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "ignore_eos": True,
    }


@dataclass(slots=True)
class Fleet:
    """Gateways and true workers that are replaced one by one."""

    stack: Stack
    service: Service
    names: Iterator[int] = field(default_factory=itertools.count)
    gateways: list[Process] = field(default_factory=list)
    workers: list[Process] = field(default_factory=list)
    drained_s: list[float] = field(default_factory=list)

    def start_gateway(self) -> Process:
        catalog = self.stack.folder / "catalog.yaml"
        catalog.write_text(f"models: [{{name: {MODEL}, path: toy.gguf}}]\n")
        process = self.stack.gateway(wait=False, catalog=catalog)
        self.gateways.append(process)
        self.service.add(process.url)
        return process

    def start_worker(self) -> Process:
        name = f"toy-{next(self.names)}"
        process = self.stack.worker(DEMO_MODEL, MODEL, worker_id=name, slots=SLOTS, ctx=1024, wait=False)
        self.workers.append(process)
        return process

    async def worker_is_ready(self, process: Process) -> None:
        beat = await asyncio.to_thread(self.stack.wait_for_worker, MODEL, process.name, process)
        process.url = beat.address

    async def replace_gateway(self, old: Process) -> None:
        await self.service.until_ready(self.start_gateway().url)
        await self._retire(old, "gateway")
        self.gateways.remove(old)

    async def replace_worker(self, old: Process) -> None:
        await self.worker_is_ready(self.start_worker())
        await self._retire(old, "worker")
        self.workers.remove(old)

    async def _retire(self, old: Process, part: str) -> None:
        """The preStop hook, then SIGTERM; the endpoint is taken away when nobody is there."""
        began = time.monotonic()
        headers = {"Authorization": f"Bearer {gateway_drain_token(self.stack.gateway_secret)}"}
        query = f"timeout_s={PATIENCE_S}"
        if part == "worker":
            headers = await asyncio.to_thread(drain_headers_of, old.url, self.stack.secret)
        query += f"&settle_s={SETTLE_S}" if part == "gateway" else ""
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{old.url}/health/drain?{query}") as response,
        ):
            told = await response.json()
            assert (response.status, told["status"]) == (200, "drained"), told
        self.drained_s.append(time.monotonic() - began)
        assert await asyncio.to_thread(old.stop) == Exit.OK, old.text()[-2000:]
        if part == "gateway":
            await self.service.remove(old.url)


@asynccontextmanager
async def loaded(stack: Stack, gateways: int, workers: int, callers: int) -> AsyncIterator[tuple[Fleet, Load]]:
    async with serving() as service, asyncio.TaskGroup() as tasks:
        fleet, load = Fleet(stack, service), Load(service, stack.key)
        for _ in range(gateways):
            fleet.start_gateway()
        for worker in [fleet.start_worker() for _ in range(workers)]:
            await fleet.worker_is_ready(worker)
        for gateway in fleet.gateways:
            await service.until_ready(gateway.url)
        asking = [tasks.create_task(load.ask_again_and_again(number)) for number in range(callers)]
        await asyncio.sleep(0.5)
        yield fleet, load
        load.over = True
        await asyncio.wait(asking)


async def roll(stack: Stack, *, gateways: int, workers: int, callers: int, rounds: int) -> None:
    async with loaded(stack, gateways, workers, callers) as (fleet, load):
        for _ in range(rounds):
            for old in list(fleet.gateways):
                await fleet.replace_gateway(old)
            for old in list(fleet.workers):
                await fleet.replace_worker(old)
        await asyncio.sleep(0.5)
    print(
        f"\n{rounds * gateways} gateways and {rounds * workers} workers replaced under {callers} callers: "
        f"{load.answers}, {len(load.troubles)} refused or broken, connections refused: {fleet.service.refused}, "
        f"longest answer {load.longest_s:.2f} s, drained in {[round(one, 1) for one in fleet.drained_s]} s"
    )
    assert load.troubles == []
    assert fleet.service.refused == 0
    assert min(load.answers["stream"], load.answers["whole"]) > 10
    await at_rest(stack, MODEL, within_s=1)


@pytest.mark.timeout(300)
async def test_of_two_gateways_and_two_workers(stack: Stack) -> None:
    await roll(stack, gateways=2, workers=2, callers=4, rounds=1)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_of_three_gateways_and_three_workers_again_and_again(stack: Stack) -> None:
    await roll(stack, gateways=3, workers=3, callers=24, rounds=2)
