"""What workers are sent: long messages on a thread, a few at a time, in slices."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from gateway.dispatch.request_size import ENTRY_CHARS, INLINE_CHARS, chars_of, num_chars
from gateway.relay.worker_client import AT_ONCE, SLICE_BYTES, Payloads
from tests.support.tools import json_of
from workers.protocol import framing
from workers.protocol.pooled import PoolPrompt, PoolRequest
from workers.protocol.queries import Detokenize, Render, Tokenize
from workers.protocol.requests import GenerateRequest, Infill, Medium, Message, Submit, ToolCall

LONG = "x" * (INLINE_CHARS + 1)

CALL = {"id": "c", "name": "f", "arguments": "{  }"}
WORDS = [f"{number:06}" for number in range(60_000)]


def submit(**fields: object) -> Submit:
    return Submit(gateway="g", call=1, request=msgspec.convert(fields, GenerateRequest), tenant="t")


@pytest.mark.parametrize(
    ("message", "chars"),
    [
        (submit(prompt="abc"), 3),
        (submit(prompt=(1, 2)), 12),
        (submit(prompt=(1, "abc")), 15),
        (Submit(gateway="g", call=1, request=GenerateRequest(prompt=array("i", [1, 2])), tenant="t"), 12),
        (submit(messages=[{"role": "user", "content": "abc"}, {"role": "assistant"}]), 3 + 2 * ENTRY_CHARS),
        (submit(messages=[{"role": "assistant", "reasoning": "ab", "tool_calls": [CALL]}]), 8 + 2 * ENTRY_CHARS),
        (submit(messages=[{"role": "tool", "name": "f", "tool_call_id": "abcd", "content": "e"}]), 6 + ENTRY_CHARS),
        (submit(prompt="", constraint={"kind": "gbnf", "text": "abcd"}), 4),
        (submit(prompt="", tools=[{"name": "f", "description": "ab"}]), 3),
        (submit(prompt="", sampling={"logit_bias": [["a", 1.0], [2, 1.0]]}), 512),
        (submit(prompt="", tools=[{"name": "f", "parameters": "{}"}], template_values='{"a":1}'), 10),
        (Render(request=GenerateRequest(infill=Infill("ab", "c"))), 3),
        (PoolRequest(inputs=("ab", (1,))), 8),
        (PoolRequest(inputs=(PoolPrompt(text="abc", media=(1,)), "d"), media=(Medium("picture", b"abc"),)), 3 + 1 + 4),
        (PoolRequest(inputs=(PoolPrompt(messages=(Message("user", "ab"),)),)), 2 + ENTRY_CHARS),
        (Tokenize(content="abc"), 3),
        (Detokenize(tokens=(1,)), 6),
        (Message("user"), 0),
    ],
)
def test_how_long_a_message_is(message: msgspec.Struct, chars: int) -> None:
    assert num_chars(message) == chars


async def test_a_short_one_is_bytes() -> None:
    async with Payloads().encode(submit(prompt="abc")) as payload:
        assert isinstance(payload.data, bytes)
        assert msgspec.json.decode(payload.data, type=Submit) == submit(prompt="abc")


async def test_a_long_one_comes_in_slices() -> None:
    async with Payloads().encode(submit(prompt=LONG)) as payload:
        assert isinstance(payload.data, AsyncIterator)
        slices = [piece async for piece in payload.data]
    assert max(map(len, slices)) == SLICE_BYTES
    whole = b"".join(slices)
    assert payload.headers == {"Content-Length": str(len(whole))}
    assert msgspec.json.decode(whole, type=Submit) == submit(prompt=LONG)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "arguments": LONG}]}]},
        {"prompt": "", "constraint": {"kind": "json_schema", "text": LONG}},
        {"prompt": (1, LONG)},
    ],
)
async def test_it_is_long_by_any_of_its_parts(fields: dict[str, object]) -> None:
    """Encoded on the loop, each of them held up everybody else's answers."""
    async with Payloads().encode(submit(**fields)) as payload:
        assert isinstance(payload.data, AsyncIterator)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"name": "f", "parameters": json_of({"enum": WORDS})}]},
        {"template_values": json_of({"documents": [[word] for word in WORDS]})},
    ],
)
async def test_tools_and_template_values_count_as_well(fields: dict[str, object]) -> None:
    message = submit(messages=[{"role": "user", "content": "x"}], **fields)
    async with Payloads().encode(message) as payload:
        assert isinstance(payload.data, AsyncIterator)
    async with Payloads().encode(Render(request=message.request)) as payload:
        assert isinstance(payload.data, AsyncIterator)


class Counted:
    """Stands for an encoder, and knows how much it was given at once."""

    def __init__(self, encode: Callable[[Any], bytes]) -> None:
        self.most = self.num = 0
        self._encode = encode

    def __call__(self, value: Any) -> bytes:
        encoded = self._encode(value)
        self.num += 1
        self.most = max(self.most, len(encoded))
        return encoded


@pytest.mark.parametrize(
    "message",
    [
        submit(messages=[{"role": "user", "content": "h\u00e9\n" * (2 << 20)}]),
        submit(messages=[{"role": "user", "content": "x" * 1000}] * 8_000),
        submit(prompt=tuple(range(1_000_000))),
        Submit(gateway="g", call=1, request=GenerateRequest(prompt=array("i", range(1_000_000))), tenant="t"),
        PoolRequest(inputs=("x" * (8 << 20),)),
        Tokenize(content="x" * (8 << 20)),
    ],
)
async def test_no_call_encodes_megabytes(message: msgspec.Struct, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call holds the interpreter's lock until it returns: 32 MiB of a conversation made gaps of 135 ms."""
    encode = framing.encode
    counted = Counted(encode)
    monkeypatch.setattr("gateway.relay.worker_client.encode", counted)
    monkeypatch.setattr(framing, "encode", counted)
    async with Payloads().encode(message) as payload:
        assert isinstance(payload.data, AsyncIterator)
        whole = b"".join([piece async for piece in payload.data])
    assert re.sub(rb"[\n\r\t]", b"", whole) == encode(message), "the marks of pieces are beside it"
    assert payload.headers == {"Content-Length": str(len(whole))}
    assert counted.most < 1 << 20
    assert counted.num > 8


async def test_one_team_does_not_have_all_turns() -> None:
    payloads = Payloads()

    def long_of(team: str) -> Submit:
        return msgspec.structs.replace(submit(prompt=LONG), tenant=team)

    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(payloads.encode(long_of("red")))
        crowd = [asyncio.create_task(stack.enter_async_context(payloads.encode(long_of("red")))) for _ in range(3)]
        await asyncio.sleep(0.05)
        async with asyncio.timeout(5.0), payloads.encode(long_of("blue")):
            pass
        for one in crowd:
            one.cancel()


async def test_few_long_ones_are_under_way_at_once() -> None:
    payloads, under_way, most = Payloads(), 0, 0

    async def send(*, reads: bool) -> None:
        nonlocal under_way, most
        async with payloads.encode(submit(prompt=LONG)) as payload:
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
    async with payloads.encode(submit(prompt="a short one needs no turn")):
        pass


def test_many_messages_without_a_word_are_long_and_not_all_looked_at() -> None:
    """Responses that were cancelled keep their input: 160,000 messages were counted and encoded on the loop."""
    call = ToolCall("a", "b", "")
    many = tuple(Message("user", "") for _ in range(16_000))
    for messages in (many, (Message("assistant", None, tool_calls=(call,) * 16_000),)):
        found = chars_of(GenerateRequest(messages=messages))
        assert INLINE_CHARS < found <= ENTRY_CHARS * 16_001
    more = GenerateRequest(messages=many * 20)
    began = time.thread_time()
    chars_of(GenerateRequest(messages=many))
    few = time.thread_time()
    chars_of(more)
    assert time.thread_time() - few < 5 * (few - began)


def test_pictures_make_a_message_long() -> None:
    """It is encoded on a thread then: base64 of 20 MiB takes 20 ms."""
    request = GenerateRequest(prompt="see", media=(Medium("picture", bytes(INLINE_CHARS)),), prompt_media=(3,))
    assert chars_of(request) > INLINE_CHARS
    assert num_chars(Submit(gateway="g", call=1, request=request, tenant="t")) > INLINE_CHARS
    assert num_chars(Render(request=request, count=True, tenant="t")) > INLINE_CHARS
