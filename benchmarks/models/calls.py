"""Calls as callers make them: streamed completions, what became of each, and streams that go on beside them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from benchmarks.models.systems import System

LIMIT_S = 150.0
"""A call that is not answered by then hangs."""
LOOK_S = 0.02
LONG = 3500
"""Tokens of a stream that goes on until nobody needs it any more."""
PROMPT = "Once upon a time there was a little"


@dataclass(slots=True)
class Answer:
    """One call. Times are time.monotonic() seconds; 0: not yet."""

    model: str
    asked_at: float
    status: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    ended_at: float = 0.0
    num_tokens: int = 0
    longest_gap_s: float = 0.0
    error: str = ""
    """Why it is not an answer; empty: it is one, or will be."""

    @property
    def is_answered(self) -> bool:
        return self.status == 200 and self.ended_at > 0 and self.num_tokens > 0 and not self.error

    @property
    def is_unbroken(self) -> bool:
        """Return whether a stream of LONG tokens runs, or has run to its end."""
        return bool(self.first_at) and not self.error and (not self.ended_at or self.num_tokens >= LONG)

    @property
    def wait_s(self) -> float:
        """Return the seconds until the first token; of a call without one, until it ended."""
        return (self.first_at or self.ended_at or time.monotonic()) - self.asked_at

    @property
    def outcome(self) -> str:
        """Return what became of it, in words."""
        if self.is_answered:
            return f"answered after {self.wait_s:.1f} s"
        if not self.ended_at:
            return f"hung for {time.monotonic() - self.asked_at:.0f} s"
        how = f"refused with {self.status}" if self.status not in (0, 200) else "broken"
        return f"{how} after {self.wait_s:.1f} s ({self.error[:80]})"


class Caller:
    """Asks one system."""

    def __init__(self, system: System, session: aiohttp.ClientSession) -> None:
        self.system = system
        self.session = session

    async def ask(self, model: str, max_tokens: int = 4, *, query: str = "", limit_s: float = LIMIT_S) -> Answer:
        """Return what became of a call. One that hangs is given up after `limit_s`."""
        answer = Answer(model, time.monotonic())
        try:
            async with asyncio.timeout(limit_s):
                await self._fill(answer, max_tokens, query)
        except TimeoutError:
            answer.error = "no answer"
        return answer

    def begin(self, model: str) -> asyncio.Task[Answer]:
        """Return a call that was made just now."""
        return asyncio.create_task(self.ask(model))

    async def ask_each(self, models: Sequence[str], pause_s: float = 0.0) -> list[Answer]:
        """Return the answers of calls that come with a pause between them, but do not wait for each other."""
        tasks = []
        for model in models:
            tasks.append(self.begin(model))
            await asyncio.sleep(pause_s)
        return list(await asyncio.gather(*tasks))

    @asynccontextmanager
    async def streaming(self, model: str) -> AsyncIterator[Answer]:
        """Yield a stream that runs; its caller leaves at the end."""
        answer = Answer(model, time.monotonic())
        task = asyncio.create_task(self._fill(answer, LONG, ""))
        try:
            async with asyncio.timeout(LIMIT_S):
                while not answer.first_at and not task.done():  # noqa: ASYNC110 - it is looked at from time to time
                    await asyncio.sleep(LOOK_S)
            yield answer
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _fill(self, answer: Answer, max_tokens: int, query: str) -> None:
        body = {
            "model": answer.model,
            "prompt": PROMPT,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        url = f"{self.system.url}/v1/completions{query}"
        try:
            async with self.session.post(url, json=body) as response:
                answer.status = response.status
                if response.status != 200:
                    answer.error = (await response.text())[:300]
                else:
                    await _read(response, answer)
        except (aiohttp.ClientError, OSError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended_at = time.monotonic()
        if answer.status == 200 and not answer.num_tokens and not answer.error:
            answer.error = "an answer without text"


async def _read(response: aiohttp.ClientResponse, answer: Answer) -> None:
    async for line in response.content:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            answer.error = str(event["error"])[:300]
        elif event.get("choices"):
            now = time.monotonic()
            answer.first_at = answer.first_at or now
            answer.longest_gap_s = max(answer.longest_gap_s, now - (answer.last_at or now))
            answer.last_at = now
            answer.num_tokens += 1


@asynccontextmanager
async def calling(system: System) -> AsyncIterator[Caller]:
    """Yield a caller with as many connections as it needs."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    headers = {"Authorization": f"Bearer {system.key}"}
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector) as session:
        yield Caller(system, session)


@dataclass(frozen=True, slots=True)
class Health:
    """Answers to `GET /health` while something else happened."""

    statuses: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


@asynccontextmanager
async def watching(caller: Caller, path: str) -> AsyncIterator[Health]:
    """Yield what an address answers, asked ten times a second."""
    health = Health()
    task = asyncio.create_task(_watch(caller, path, health))
    try:
        yield health
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _watch(caller: Caller, path: str, health: Health) -> None:
    while True:
        began, status = time.monotonic(), 0
        try:
            async with asyncio.timeout(LIMIT_S), caller.session.get(f"{caller.system.url}{path}") as answer:
                status = answer.status
                await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            status = 0
        health.statuses.append(status)
        health.times_s.append(time.monotonic() - began)
        await asyncio.sleep(0.1)
