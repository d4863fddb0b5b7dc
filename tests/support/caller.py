"""A caller of the public API over a real socket, for tests that look at single chunks as they arrive."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass(slots=True)
class Stream:
    """One streamed answer as far as it has been read."""

    status: int
    headers: dict[str, str]
    response: aiohttp.ClientResponse
    chunks: list[dict[str, Any]] = field(default_factory=list)
    comments: int = 0
    done: bool = False
    error: dict[str, Any] | None = None
    arrived: list[float] = field(default_factory=list)
    """time.monotonic() of each chunk."""

    async def read(self) -> AsyncIterator[dict[str, Any]]:
        """Chunks as they come; ends at `[DONE]` or at the end of the connection; an in-stream error is kept."""
        async for line in self.response.content:
            if line.startswith(b":"):
                self.comments += 1
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                self.done = True
                continue
            chunk: dict[str, Any] = json.loads(line[6:])
            self.arrived.append(time.monotonic())
            if "error" in chunk:
                self.error = chunk["error"]
                continue
            self.chunks.append(chunk)
            yield chunk

    async def finish(self) -> Stream:
        """Reads to the end."""
        async for _ in self.read():
            pass
        return self

    async def until_text(self) -> Stream:
        """Reads up to the first chunk that carries text."""
        async for chunk in self.read():
            if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                break
        return self

    @property
    def text(self) -> str:
        return "".join(c["choices"][0]["delta"].get("content") or "" for c in self.chunks if c["choices"])

    @property
    def finish_reason(self) -> str | None:
        reasons = [c["choices"][0].get("finish_reason") for c in self.chunks if c["choices"]]
        return next((reason for reason in reasons if reason), None)

    @property
    def usage(self) -> dict[str, Any] | None:
        return next((c["usage"] for c in self.chunks if c.get("usage")), None)


@dataclass(slots=True)
class Caller:
    """Asks one gateway with one key. `model` is put into each body that names none."""

    session: aiohttp.ClientSession
    url: str
    model: str

    def body(self, prompt: str = "Tell me a story about a boat.", **more: Any) -> dict[str, Any]:
        return {"model": self.model, "messages": [{"role": "user", "content": prompt}], "temperature": 0, **more}

    @asynccontextmanager
    async def stream(self, prompt: str = "Tell me a story about a boat.", **more: Any) -> AsyncIterator[Stream]:
        """A streamed chat completion; leaving the block closes the connection, as a client that vanishes does."""
        body = self.body(prompt, stream=True, stream_options={"include_usage": True}, **more)
        response = await self.session.post(f"{self.url}/v1/chat/completions", json=body)
        try:
            yield Stream(response.status, dict(response.headers), response)
        finally:
            response.close()

    async def whole(self, prompt: str = "Tell me a story about a boat.", **more: Any) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a chat completion that is not streamed."""
        async with self.session.post(f"{self.url}/v1/chat/completions", json=self.body(prompt, **more)) as response:
            return response.status, await response.json()


@asynccontextmanager
async def calling(url: str, key: str, model: str) -> AsyncIterator[Caller]:
    """A caller with a connection pool of its own."""
    headers = {"Authorization": f"Bearer {key}"}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
        yield Caller(session, url, model)


@asynccontextmanager
async def taken(caller: Caller, count: int) -> AsyncIterator[list[Stream]]:
    """That many streams under way."""
    async with AsyncExitStack() as held:
        streams = [await held.enter_async_context(caller.stream()) for _ in range(count)]
        for stream in streams:
            await stream.until_text()
        yield streams


async def seen(caller: Caller, count: int) -> None:
    """Wait until the gateway knows that many workers of the caller's model."""
    async with asyncio.timeout(10):
        while True:
            async with caller.session.get(f"{caller.url}/v1/models/{caller.model}") as response:
                card = await response.json()
            if card.get("workers") == count:
                return
            await asyncio.sleep(0.02)
