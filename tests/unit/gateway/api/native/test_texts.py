"""Tokens as llama-server tells them, however many there are."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from gateway.api.native.prompts import read_native_prompts
from gateway.api.native.texts import TOKENS_PER_TURN, tokens_body
from workers.protocol.text import Tokenized

MANY = 20 * TOKENS_PER_TURN + 1


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (Tokenized(tokens=()), []),
        (Tokenized(tokens=(5, 6)), [5, 6]),
        (Tokenized(tokens=(), pieces=()), []),
        (Tokenized(tokens=(5, 6), pieces=(b"a", b"\xc3")), [{"id": 5, "piece": "a"}, {"id": 6, "piece": [0xC3]}]),
        (Tokenized(tokens=tuple(range(MANY))), list(range(MANY))),
    ],
)
async def test_numbers_or_pieces(found: Tokenized, told: list[Any]) -> None:
    assert json.loads(await tokens_body(found)) == {"tokens": told}


async def test_others_get_their_turn_while_many_are_written() -> None:
    num_turns = 0

    async def other() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    body = await tokens_body(Tokenized(tokens=tuple(range(MANY)), pieces=(b"ab",) * MANY))
    beside.cancel()
    assert len(json.loads(body)["tokens"]) == MANY
    assert num_turns == 20


def test_long_prompts_of_tokens_are_read_at_once() -> None:
    tokens = list(range(1_000_000))
    began = time.process_time()
    assert read_native_prompts(tokens) == (tuple(tokens),)
    assert time.process_time() - began < 0.35
