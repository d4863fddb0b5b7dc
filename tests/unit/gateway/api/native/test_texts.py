"""Tokens as llama-server tells them, however many there are."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from array import array
from contextlib import closing
from typing import Any

import msgspec
import pytest
from starlette.types import Message

from gateway.api.http.answers import JSON, send_parts
from gateway.api.intake.decoding import DecodingThread
from gateway.api.intake.intake import Intake
from gateway.api.intake.memory_budget import MemoryBudget
from gateway.api.media.attachments import Attachments
from gateway.api.native.request import NativePrompt, read_native_prompts
from gateway.api.native.texts import CHARS_PER_TURN, TOKENS_PER_TURN, decoded_reply, text_parts, token_parts
from gateway.call import Principal
from gateway.errors import InternalError, TakesTooMuch
from gateway.telemetry.request_log import RequestLog
from workers.protocol.queries import Detokenized, Tokenized, decode_detokenized, packed

MANY = 20 * TOKENS_PER_TURN + 1


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (Tokenized(ids=b""), []),
        (Tokenized(ids=packed((5, 6))), [5, 6]),
        (Tokenized(ids=b"", pieces=()), []),
        (Tokenized(ids=packed((5, 6)), pieces=(b"a", b"\xc3")), [{"id": 5, "piece": "a"}, {"id": 6, "piece": [0xC3]}]),
        (Tokenized(ids=packed(range(MANY))), list(range(MANY))),
    ],
)
def test_numbers_or_pieces(found: Tokenized, told: list[Any]) -> None:
    assert json.loads(b"".join(token_parts(found))) == {"tokens": told}


async def test_others_get_their_turn_while_many_are_written() -> None:
    num_turns, sent = 0, list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    async def other() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    found = Tokenized(ids=packed(range(MANY)), pieces=(b"ab",) * MANY)
    await send_parts(send, token_parts(found), JSON, RequestLog("r", "POST", "/tokenize"))
    beside.cancel()
    assert len(json.loads(b"".join(message["body"] for message in sent[1:]))["tokens"]) == MANY
    assert num_turns >= 20
    assert max(len(message["body"]) for message in sent[1:]) < 64 * TOKENS_PER_TURN


@pytest.mark.serial
def test_long_prompts_of_tokens_are_read_at_once() -> None:
    tokens = list(range(1_000_000))
    took = []
    for _ in range(5):  # the best of them: a processor that others share takes up to twice as long now and then
        began = time.thread_time()
        found = read_native_prompts(tokens, "prompt", Attachments())
        took.append(time.thread_time() - began)
        assert found == (NativePrompt(array("i", tokens)),)
    assert min(took) < 0.35


@pytest.mark.parametrize("text", ["", 'a\0"\\\n', "\U0001f642\u00fc" * CHARS_PER_TURN, "\0" * (2 * CHARS_PER_TURN + 1)])
def test_a_long_text_is_written_some_at_a_time(text: str) -> None:
    parts = list(text_parts("content", text))
    assert json.loads(b"".join(parts)) == {"content": text}
    assert max(map(len, parts)) <= 6 * CHARS_PER_TURN + 20
    assert (len(parts) == 1) == (len(text) <= CHARS_PER_TURN)


async def test_a_reply_that_is_longer_than_its_request_is_counted_and_decoded_on_a_thread() -> None:
    budget, threads = MemoryBudget(160 << 20), list[threading.Thread]()
    intake = Intake(8 << 20, budget, DecodingThread(), lambda: 4096)
    reply = msgspec.json.encode(Detokenized(content="x" * (8 << 20)))

    def decode(raw: bytes) -> Detokenized:
        threads.append(threading.current_thread())
        return decode_detokenized(raw)

    with closing(intake.message(Principal("key", "team", None, admin=False), b"")) as held:
        found = await decoded_reply(held, reply, decode)
        assert budget.num_bytes == len(reply)
        assert len(found.content) == 8 << 20
        assert threads[0] is not threading.main_thread()
        with pytest.raises(InternalError, match="can't read"):
            await decoded_reply(held, b"x", decode)
        for _ in range(6):
            await decoded_reply(held, reply, decode)
        with pytest.raises(TakesTooMuch):
            await decoded_reply(held, reply, decode)
    assert budget.num_bytes == 0
