"""Tokens as llama-server tells them, however many there are."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from starlette.types import Message

from gateway.api.answers import JSON, send_parts
from gateway.api.native.prompts import read_native_prompts
from gateway.api.native.texts import TOKENS_PER_TURN, token_parts
from gateway.telemetry.trail import Trail
from workers.protocol.text import Tokenized, packed

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
    await send_parts(send, token_parts(found), JSON, Trail("r", "POST", "/tokenize"))
    beside.cancel()
    assert len(json.loads(b"".join(message["body"] for message in sent[1:]))["tokens"]) == MANY
    assert num_turns >= 20
    assert max(len(message["body"]) for message in sent[1:]) < 64 * TOKENS_PER_TURN


def test_long_prompts_of_tokens_are_read_at_once() -> None:
    tokens = list(range(1_000_000))
    began = time.process_time()
    assert read_native_prompts(tokens) == (tuple(tokens),)
    assert time.process_time() - began < 0.35
