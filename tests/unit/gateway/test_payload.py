"""What workers are sent: long messages on a thread, a few at a time, in slices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from gateway.relay.payload import AT_ONCE, INLINE_CHARS, SLICE_BYTES, Payloads, num_chars
from workers.protocol.pooled import PoolRequest
from workers.protocol.requests import GenerateRequest, Infill, Message, Submit
from workers.protocol.text import Detokenize, Render, Tokenize

LONG = "x" * (INLINE_CHARS + 1)


def submit(**fields: object) -> Submit:
    return Submit(gateway="g", call=1, request=msgspec.convert(fields, GenerateRequest), tenant="t")


@pytest.mark.parametrize(
    ("message", "chars"),
    [
        (submit(prompt="abc"), 3),
        (submit(prompt=(1, 2)), 12),
        (submit(messages=[{"role": "user", "content": "abc"}, {"role": "assistant"}]), 3),
        (Render(request=GenerateRequest(infill=Infill("ab", "c"))), 3),
        (PoolRequest(inputs=("ab", (1,))), 8),
        (Tokenize(content="abc"), 3),
        (Detokenize(tokens=(1,)), 6),
        (Message("user"), 0),
    ],
)
def test_how_long_a_message_is(message: msgspec.Struct, chars: int) -> None:
    assert num_chars(message) == chars


async def test_a_short_one_is_bytes() -> None:
    async with Payloads().of(submit(prompt="abc")) as payload:
        assert isinstance(payload.data, bytes)
        assert msgspec.json.decode(payload.data, type=Submit) == submit(prompt="abc")


async def test_a_long_one_comes_in_slices() -> None:
    async with Payloads().of(submit(prompt=LONG)) as payload:
        assert isinstance(payload.data, AsyncIterator)
        slices = [piece async for piece in payload.data]
    assert max(map(len, slices)) == SLICE_BYTES
    whole = b"".join(slices)
    assert payload.headers == {"Content-Length": str(len(whole))}
    assert msgspec.json.decode(whole, type=Submit) == submit(prompt=LONG)


async def test_few_long_ones_are_under_way_at_once() -> None:
    payloads, under_way, most = Payloads(), 0, 0

    async def send(*, reads: bool) -> None:
        nonlocal under_way, most
        async with payloads.of(submit(prompt=LONG)) as payload:
            under_way += 1
            most = max(most, under_way)
            assert isinstance(payload.data, AsyncIterator)
            if reads:
                async for _ in payload.data:
                    await asyncio.sleep(0)
            under_way -= 1
            await asyncio.sleep(0.01)

    async with asyncio.timeout(20.0):
        await asyncio.gather(*(send(reads=number % 2 == 0) for number in range(10)))
    assert most <= AT_ONCE + 1
    async with payloads.of(submit(prompt="a short one needs no turn")):
        pass
