"""What a body may hold, told from its bytes."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from gateway.api.body import read_object
from gateway.api.body_bounds import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_STRINGS,
    MIN_ITEMS,
    UNCHECKED_BYTES,
    check_shape,
)
from gateway.api.openai.chat_request import read_chat
from gateway.errors import ContextOverflow, InvalidRequest
from tests.support.large_bodies import LARGE_BODIES, LargeBody

BLANKS = b" " * (UNCHECKED_BYTES + 1)
"""Makes a body long enough to be looked at."""


def shape_of(document: Any, max_items: int = 0) -> tuple[int, int]:
    shape = check_shape(json.dumps(document).encode() + BLANKS, max_items)
    return shape.num_strings, shape.held_bytes


@pytest.mark.parametrize(
    ("text", "strings"),
    [
        ("", 1),
        ('"' * 9, 1),
        ("\\" * 9, 1),
        ('\\"' * 9, 1),
        ("[{,}]" * MAX_CONTAINERS, 1),
        ("," * (MIN_ITEMS + 1), 1),
        ("\\\\" + '",["', 1),
    ],
)
def test_text_is_no_structure(text: str, strings: int) -> None:
    assert shape_of(text)[0] == strings
    assert shape_of({text: [text]})[0] == 2 * strings


def test_strings_are_bounded() -> None:
    assert shape_of(["x"] * MAX_STRINGS, MAX_STRINGS)[0] == MAX_STRINGS
    with pytest.raises(InvalidRequest, match=f"has {MAX_STRINGS + 1} strings"):
        shape_of(["x"] * (MAX_STRINGS + 1))


def test_arrays_and_objects_are_bounded() -> None:
    shape_of([{}] * (MAX_CONTAINERS - 1), MAX_CONTAINERS)
    with pytest.raises(InvalidRequest, match=f"has {MAX_CONTAINERS + 1} arrays and objects"):
        shape_of([[]] * MAX_CONTAINERS)
    with pytest.raises(InvalidRequest, match="arrays and objects"):
        check_shape(b"]" * (1 << 20), 0)


def test_depth_is_bounded() -> None:
    check_shape(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + BLANKS, 0)
    check_shape(b"[" + b"[]," * 1000 + b"[]]" + BLANKS, 0)
    with pytest.raises(InvalidRequest, match=f"nested too deeply: {MAX_DEPTH + 1} levels"):
        check_shape(b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1) + BLANKS, 0)


def test_no_array_is_longer_than_the_longest_context() -> None:
    shape_of({"prompt": [1] * 50_000}, 50_000)
    shape_of({"prompt": [[1] * 50_000] * 3}, 50_000)
    with pytest.raises(ContextOverflow, match="array of 50001 items; the longest context here has 50000 tokens"):
        shape_of({"prompt": [[1] * 50_001, [1]]}, 50_000)
    shape_of([1] * MIN_ITEMS, 512)  # a short context does not keep honest lists out


def test_what_a_body_takes_in_memory_is_no_less_than_its_text() -> None:
    assert shape_of("a" * 100_000)[1] >= 100_000
    wide = json.dumps(["a" * 100_000 + "\U0001f600"])
    assert check_shape(wide.encode(), 0).held_bytes >= 400_000
    assert check_shape(json.dumps(["a" * 100_000 + "\U0001f600"], ensure_ascii=False).encode(), 0).held_bytes >= 400_000
    assert shape_of([12_345] * 20_000)[1] >= 20_000 * 16


@pytest.mark.parametrize("large", LARGE_BODIES, ids=lambda large: large.name)
def test_refusing_takes_no_time(large: LargeBody) -> None:
    body, began = large.of(), time.process_time()
    with pytest.raises(InvalidRequest):
        check_shape(body, 131_072)
    assert time.process_time() - began < 1.0


def test_a_number_of_fields() -> None:
    many = {f"k{n}": 1 for n in range(1001)}
    with pytest.raises(InvalidRequest, match=r"The body has 1001 fields\. Send at most 1000\."):
        read_object(json.dumps(many).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "user", "content": [{}] * 9_999}] * 5},
        {"messages": [{}] * 9_999},
        {"tools": [{"type": "function", "function": {f"k{n}": 1 for n in range(50_000)}}] * 3},
    ],
)
def test_faults_beyond_the_first_are_not_looked_for(change: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **change}
    with pytest.raises(InvalidRequest) as refused:
        read_chat(json.dumps(body).encode())
    more = refused.value.message.partition("(")[2].split(" ")[0]
    assert int(more or "0") < 10
