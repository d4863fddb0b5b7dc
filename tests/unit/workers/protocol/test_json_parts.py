"""Messages as JSON in parts: the same bytes as in one call, and no part that takes long."""

from __future__ import annotations

import random
import re
from typing import Any

import msgspec
import pytest

from tests.support.tools import json_of, tool_of
from workers.protocol.framing import PART_CHARS, base64_parts, is_long, json_parts, marked_parts, struct_parts
from workers.protocol.pooled import PoolPrompt, PoolRequest, PoolResult
from workers.protocol.queries import Tokenized
from workers.protocol.requests import GenerateRequest, Medium, Message, Submit

RANDOM = random.Random(7)
LONG = 'h\u00e9 \U0001f600\n\x00\x7f"\\</' * 40_000
BYTES = RANDOM.randbytes(1 << 20)


def submit(**fields: Any) -> Submit:
    return Submit(gateway="g", call=1, request=GenerateRequest(**fields), tenant="t")


SHORT = [submit(prompt="abc"), PoolRequest(inputs=("a", (1, 2))), "", [], {}, 7, None]
LONGER = [
    LONG,
    {LONG: [LONG, {"a": LONG}], "b": None},
    [[[LONG]], 1.5, True, None, "a"],
    {f"{number:06}": {} for number in range(50_000)},
    [number if number % 3 else str(number) for number in range(100_000)],
    submit(messages=(Message("user", content=LONG),) * 2),
    submit(messages=(Message("user", content="x" * 500),) * 2_000),
    submit(prompt=tuple(range(300_000))),
    submit(tools=(tool_of("f", "d", {"enum": ["x" * 20] * 20_000}),), template_values=json_of({"a": LONG})),
    PoolRequest(inputs=(LONG, tuple(range(100_000)), "a")),
    PoolRequest(inputs=(PoolPrompt(text=LONG, media=(1,)), "a"), media=(Medium("picture", BYTES),)),
    PoolResult(pooling="mean", width=4, rows=(1,), num_tokens=(1,), vectors=BYTES),
    Tokenized(ids=BYTES, pieces=(b"ab",) * 50_000),
]


@pytest.mark.parametrize("message", SHORT, ids=lambda message: type(message).__name__)
def test_a_short_one_is_one_part(message: Any) -> None:
    assert not is_long(message)
    assert list(json_parts(message)) == list(marked_parts(message)) == [msgspec.json.encode(message)]


@pytest.mark.parametrize("message", LONGER, ids=lambda message: type(message).__name__)
def test_a_long_one_is_the_same_in_parts(message: Any) -> None:
    assert is_long(message)
    parts = list(json_parts(message))
    assert b"".join(parts) == msgspec.json.encode(message)
    marked = b"".join(marked_parts(message))
    assert marked[:1] + marked[-1:] == b"\n\r"
    assert re.sub(rb"[\n\r\t]", b"", marked) == msgspec.json.encode(message)
    assert len(parts) > 1
    assert max(map(len, parts)) < 8 * PART_CHARS, "a character may be six in JSON"


@pytest.mark.parametrize("sizes", [[0], [1], [2, 2], [3], [4, 1, 0, 5], [PART_CHARS + 1, 1, PART_CHARS * 2 - 1]])
def test_bytes_that_lie_in_several_places_are_one_text(sizes: list[int]) -> None:
    buffers = [RANDOM.randbytes(size) for size in sizes]
    assert b"".join(base64_parts(map(memoryview, buffers))) == msgspec.json.encode(b"".join(buffers))


def test_a_field_of_a_struct_may_be_given_as_json() -> None:
    head = PoolResult(pooling="mean", width=2, rows=(1, 1), num_tokens=(3, 4), vectors=b"")
    whole = b"".join(struct_parts(head, {"vectors": base64_parts([b"abcd", b"efgh"])}))
    assert whole == msgspec.json.encode(msgspec.structs.replace(head, vectors=b"abcdefgh"))
