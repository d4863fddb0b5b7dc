"""What callers who leave pay of their teams' shares: what came of their answers, read or not."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
import redis

from gateway.routing.pool import TYPICAL_FOR_S
from tests.support.caller import Caller, calling
from tests.support.stack import Stack
from tests.support.waiting import until
from workers.protocol import keys

SHORT, LONG = 5, 600
"""Tokens of the answers by which those to come are predicted, and of the answer that is left."""
STEP_MS = 5
CHAT = {"model": "pool", "messages": [{"role": "user", "content": "hi"}], "max_tokens": LONG, "stream": True}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        running.fake_worker("pool", "--step-ms", str(STEP_MS), "--tokens", "4000", worker_id="pool-a")
        running.gateway()
        yield running


def charged(stack: Stack) -> float:
    """Return the tokens that the only team with calls was charged for so far."""
    with redis.Redis(unix_socket_path=str(stack.redis.socket)) as client:
        fields = client.hgetall(keys.ledger("pool"))
    assert isinstance(fields, dict)
    (text,) = [text for name, text in fields.items() if name.startswith(b"t:")]
    return float(text.split()[0])


def usual_tokens(stack: Stack) -> float:
    beat = stack.heartbeat("pool", "pool-a")
    return 0.0 if beat is None else beat.load.answer_tokens


@asynccontextmanager
async def usual(stack: Stack) -> AsyncIterator[Caller]:
    """A caller after answers of a few tokens, by which the length of all is predicted, and beside one that goes on:
    what idle teams were charged is forgotten."""
    async with calling(stack.gateways[0].url, stack.key, "pool") as caller:
        for _ in range(2):
            await asyncio.gather(*(caller.whole(max_tokens=SHORT) for _ in range(30)))
            await until(lambda: usual_tokens(stack) == SHORT, 10.0, "the worker tells how long answers are")
            await asyncio.sleep(TYPICAL_FOR_S + 0.5)  # the gateway reckons with it
        async with caller.stream() as lasting:
            await lasting.until_text()
            yield caller


async def left(stack: Stack) -> None:
    await until(lambda: stack.leases("pool") == 1, 5.0, "the slot is given back")
    await asyncio.sleep(0.1)


async def test_a_call_that_is_left_before_its_end_pays_for_what_came(stack: Stack) -> None:
    async with usual(stack) as caller:
        before = charged(stack)
        async with caller.stream(max_tokens=LONG) as stream:
            for _ in range(LONG // 2):
                await stream.until_text()
        await left(stack)
        assert LONG / 2 <= charged(stack) - before < LONG


async def test_a_call_that_is_left_unread_pays_for_what_came(stack: Stack) -> None:
    async with usual(stack):
        before, url, body = charged(stack), urlsplit(stack.gateways[0].url), json.dumps(CHAT)
        lines = ["POST /v1/chat/completions HTTP/1.1", f"Host: {url.netloc}", f"Authorization: Bearer {stack.key}"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", body]
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((url.hostname, url.port))
            connection.sendall("\r\n".join(lines).encode())
            await asyncio.sleep(0.5 * LONG * STEP_MS / 1000)
        await left(stack)
        assert charged(stack) - before > LONG / 8
