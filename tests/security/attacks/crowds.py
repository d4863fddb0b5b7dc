"""Attacks by the mere number of one key's requests: hundreds at once that cost little each, and leave together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from urllib.parse import urlsplit

from tests.security.attack import Attack, Target

NUM_SHORT, SHORT_S = 500, 1.0
NUM_SINGLE = 200
NUM_STREAMS, STREAMS_S = 300, 0.3
NUM_HALF_BODIES, HALF_BODIES_S = 200, 2.0
NUM_REFUSED = 20
GIVES_UP_S = 10.0


def _chat(target: Target, **more: object) -> dict[str, object]:
    return {"model": target.model, "messages": [{"role": "user", "content": "Who are you?"}], **more}


async def _give_up(target: Target, number: int, after_s: float, body: dict[str, object]) -> None:
    """Ask that often at once, and close all connections together after so many seconds."""
    async with target.session() as session:
        asking = [asyncio.create_task(target.post(session, "/v1/chat/completions", body)) for _ in range(number)]
        await asyncio.sleep(after_s)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def _short_given_up(target: Target) -> None:
    await _give_up(target, NUM_SHORT, SHORT_S, _chat(target, max_tokens=16))


async def _streams_given_up(target: Target) -> None:
    await _give_up(target, NUM_STREAMS, STREAMS_S, _chat(target, max_tokens=16, stream=True))


async def _single_tokens(target: Target) -> None:
    body = _chat(target, max_tokens=1)
    async with target.session() as session:
        await asyncio.gather(*(target.post(session, "/v1/chat/completions", body) for _ in range(NUM_SINGLE)))


async def _refusals(target: Target) -> None:
    async with target.session() as session:
        bodies = [_chat(target, max_tokens=-number) for number in range(1, NUM_REFUSED + 1)]
        await asyncio.gather(*(target.post(session, "/v1/chat/completions", body) for body in bodies))


@contextlib.asynccontextmanager
async def _half_a_body(target: Target) -> AsyncGenerator[None]:
    address = urlsplit(target.url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"authorization: Bearer %b\r\ncontent-length: 4000\r\n\r\n{" % target.attacker_key.encode()
        )
        yield
    finally:
        writer.transport.abort()


async def _half_bodies(target: Target) -> None:
    async with contextlib.AsyncExitStack() as held:
        for _ in range(NUM_HALF_BODIES):
            await held.enter_async_context(_half_a_body(target))
        await asyncio.sleep(HALF_BODIES_S)


ATTACKS = (
    Attack(
        name="short-calls-given-up",
        about="500 short chats at once, all given up after a second: gaps of 131 ms, TTFT of 567.",
        strike=_short_given_up,
        short_s=2.5,
    ),
    Attack(
        name="single-tokens",
        about="200 calls of one token each at once, again and again: gaps of 188 ms, TTFT of 164.",
        strike=_single_tokens,
        pause_s=0.0,
    ),
    Attack(
        name="streams-given-up",
        about="300 streams at once, all given up after 0.3 s: gaps of 134 ms.",
        strike=_streams_given_up,
    ),
    Attack(
        name="half-bodies",
        about="200 connections with a key whose bodies lack their ends, closed together: gaps of 111 ms.",
        strike=_half_bodies,
        short_s=2.5,
    ),
    Attack(
        name="refusals",
        about="Hundreds of refused requests a second from one key: TTFT of 239 ms.",
        strike=_refusals,
        pause_s=0.1,
    ),
)
