"""Gateways before one worker, whose keys have limits; and callers that count what is admitted."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from accounts.protocol.records import Limits, digest, encode_record
from tests.support.stack import Process, Stack

MODEL, SLOW = "fake", "slow"
"""Models: of one the answers end at once, of the other never."""
KEY = "pk-limited-0123456789abcdef"


def key_setting(keys: Mapping[str, Limits], **fields: Any) -> str:
    """The setting `api_keys`: key -> its limits; each key's name is the key without its prefix."""
    records = [
        {"name": name_of(key), "sha256": digest(key), "limits": json.loads(encode_limits(limits)), **fields}
        for key, limits in keys.items()
    ]
    return json.dumps(records)


def encode_limits(limits: Limits) -> bytes:
    return encode_record(limits)


def name_of(key: str) -> str:
    return key.removeprefix("pk-")


@contextmanager
def site(
    limits: Limits | Mapping[str, Limits], *, gateways: int = 1, worker: Sequence[str] = (), slots: int = 64
) -> Iterator[Stack]:
    """A stack whose gateways know `KEY` with these limits, or each of several keys with its own."""
    keys = limits if isinstance(limits, Mapping) else {KEY: limits}
    with Stack() as stack:
        stack.fake_worker(MODEL, "--step-ms", "1", "--tokens", "4", *worker, slots=slots)
        stack.fake_worker(SLOW, "--step-ms", "20", "--tokens", "100000", slots=slots)
        for _ in range(gateways):
            stack.gateway(api_keys=key_setting(keys), wait=False)
        for gateway in stack.gateways:
            stack.wait_until_ready(gateway)
            stack.wait_until_listed(gateway, MODEL, SLOW)
        yield stack


@dataclass(slots=True)
class Answered:
    status: int
    headers: Mapping[str, str]
    body: Any

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.body["error"]
        return error


async def ask(
    session: aiohttp.ClientSession, gateway: Process, key: str = KEY, path: str = "/v1/chat/completions", **body: Any
) -> Answered:
    """Ask for a short answer."""
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"model": MODEL}
    headers = {"Authorization": f"Bearer {key}"}
    async with session.post(f"{gateway.url}{path}", json={**asked, **body}, headers=headers) as answer:
        raw = await answer.read()
        parsed = json.loads(raw) if answer.content_type == "application/json" else raw.decode()
        return Answered(answer.status, answer.headers, parsed)


@dataclass(slots=True)
class Crowd:
    """Callers that ask gateways in turn, more often than they may."""

    gateways: list[Process]
    per_s: float = 100.0
    statuses: Counter[int] = field(default_factory=Counter)
    admitted_at: list[float] = field(default_factory=list)
    """time.monotonic() at which each admitted request was sent."""
    troubles: list[str] = field(default_factory=list)

    async def run(self, seconds: float) -> None:
        began, number = time.monotonic(), 0
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as tasks:
            while (passed := time.monotonic() - began) < seconds:
                while number < passed * self.per_s:
                    tasks.create_task(self._one(session, self.gateways[number % len(self.gateways)]))
                    number += 1
                await asyncio.sleep(0.01)

    async def _one(self, session: aiohttp.ClientSession, gateway: Process) -> None:
        sent_at = time.monotonic()
        try:
            answered = await ask(session, gateway, max_tokens=2)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.statuses[0] += 1
            self.troubles.append(repr(error)[:120])
            return
        self.statuses[answered.status] += 1
        if answered.status == 200:
            self.admitted_at.append(sent_at)
        elif answered.status != 429:
            self.troubles.append(str(answered.body)[:200])

    @property
    def admitted(self) -> int:
        return self.statuses[200]
