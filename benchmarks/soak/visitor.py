"""One caller of the fleet: asks a gateway, reads as it likes, leaves when it likes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.soak.fleet import TEAM_KEY, Fleet

LAST_WORDS = ("message_stop", "response.completed", "response.incomplete")
TROUBLE = frozenset({409, 429, 502, 503, 529})
"""What a sound request may be told where processes are killed, paused and cut off; 529 is Anthropic's 503."""
WORDS = ("boat", "fox", "Tom", "cat", "river", "tree", "cake", "Paddock", "red", "small", "rain", "seven", "bird")


class Refused(Exception):
    """An error that the gateway told, as a status or in the stream."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.code = code


class Broken(Exception):
    """A stream that ended before its last word."""


class Surprise(Exception):
    """An answer that it should not have been."""


@dataclass(slots=True)
class Visitor:
    """`url` is the gateway that it asks, `other` the other one."""

    fleet: Fleet
    session: aiohttp.ClientSession
    chance: random.Random
    url: str
    other: str
    key: str
    models: tuple[str, ...]
    seen: list[str] = field(default_factory=list)
    """Ids of stored responses that others may go on from; shared by all visitors."""

    def headers(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}", **(more or {})}

    def words(self, least: int = 3, most: int = 40) -> str:
        return " ".join(self.chance.choices(WORDS, k=self.chance.randrange(least, most)))

    def text(self) -> str:
        """Some words; every sixth time the same beginning as others have, which is cached somewhere."""
        return f"Tell me a story about a boat. {self.words()}" if self.chance.random() < 1 / 6 else self.words()

    def tokens(self) -> int:
        return self.chance.randrange(4, 48)

    async def ask(
        self, method: str, path: str, body: Any = None, *, allowed: tuple[int, ...] = (), url: str = ""
    ) -> Any:
        """The answer's JSON, or None for a status among `allowed`. Raises Refused, aiohttp.ClientError."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = self.headers({"content-type": "application/json"})
        async with self.session.request(method, (url or self.url) + path, data=data, headers=headers) as response:
            raw = await response.read()
            if response.status < 300:
                return json.loads(raw) if response.content_type == "application/json" else raw
            if response.status in allowed:
                return None
            raise refusal(response.status, raw)

    async def post(self, path: str, body: Any, *, allowed: tuple[int, ...] = ()) -> Any:
        return await self.ask("POST", path, body, allowed=allowed)

    async def refuses(self, method: str, path: str, body: Any, *expected: int) -> None:
        """Raises Surprise where the answer is none of these statuses, and no trouble."""
        try:
            answer = await self.ask(method, path, body)
        except Refused as refused:
            if refused.status not in (*expected, *TROUBLE):
                raise Surprise(f"{path} told {refused} instead of {expected}") from None
        else:
            raise Surprise(f"{path} answered {str(answer)[:200]} instead of {expected}")

    @asynccontextmanager
    async def opened(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None, *, url: str = ""
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Leaving the block closes the connection. Raises Refused."""
        response = await self.session.post((url or self.url) + path, json=body, headers=self.headers(headers))
        try:
            if response.status != 200:
                raise refusal(response.status, await response.read())
            yield response
        finally:
            response.close()

    async def stream(self, path: str, body: Any, *, leave_after: int | None = None) -> int:
        """Reads to the last word, or so many events; how many there were. Raises Refused, Broken."""
        num_events = 0
        async with self.opened(path, body) as response:
            async for event in events(response):
                num_events += 1
                if num_events == leave_after or is_last(event):
                    return num_events
        raise Broken(path)

    async def pause(self, most_s: float) -> None:
        await asyncio.sleep(self.chance.uniform(0.0, most_s))


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """What stands in the `data:` lines. Raises Refused for an error among them."""
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            yield {"type": "message_stop"}
            return
        event = json.loads(line[6:])
        fault = event.get("error") or (event.get("response") or {}).get("error")
        if fault:
            code = str(fault.get("code") or fault.get("type"))
            raise Refused(STATUSES.get(code, 502), code, str(fault.get("message")))
        yield event


STATUSES = {"internal_error": 500, "api_error": 500, "server_error": 502, "client_too_slow": 500}
"""Codes in a stream that tell what the status would have been; the rest is trouble with workers."""


def is_last(event: Mapping[str, Any]) -> bool:
    return event.get("type") in LAST_WORDS or event.get("stop") is True


def refusal(status: int, raw: bytes) -> Refused:
    try:
        error = json.loads(raw)["error"]
        return Refused(status, str(error.get("code") or error.get("type")), str(error.get("message")))
    except (ValueError, KeyError, TypeError):
        return Refused(status, "", raw[:200].decode(errors="replace"))


def keys_of(fleet: Fleet) -> tuple[str, str]:
    """The first key, which is an admin's, and another team's."""
    return fleet.stack.key, TEAM_KEY
