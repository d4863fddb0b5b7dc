"""What a body may hold, told from its bytes."""

from __future__ import annotations

import contextlib
import json
import random
import time
import tracemalloc
from typing import Any

import pytest

from gateway.api.intake.body import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_EXPONENTS,
    MAX_NUMBERS,
    MAX_STRINGS,
    MIN_ITEMS,
    UNCHECKED_BYTES,
    UNCHECKED_FACTOR,
    Shape,
    ShapeCheck,
    decode_json,
    read_object,
    slices,
    unchecked_held_bytes,
)
from gateway.api.openai.requests import read_chat
from gateway.errors import ContextOverflow, InvalidRequest
from tests.support.large_bodies import LARGE_BODIES, LargeBody

BLANKS = b" " * (UNCHECKED_BYTES + 1)
"""Makes a body long enough to be looked at."""


def check_shape(raw: bytes, max_items: int) -> Shape:
    """Return how much a body holds. Raises InvalidRequest, ContextOverflow."""
    check = ShapeCheck(max_items)
    for piece in slices(raw):
        check.add(piece)
    return check.shape()


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
    with pytest.raises(InvalidRequest, match=f"has more than {MAX_STRINGS} strings"):
        shape_of(["x"] * (MAX_STRINGS + 1), 2 * MAX_STRINGS)


def test_arrays_and_objects_are_bounded() -> None:
    shape_of([{}] * (MAX_CONTAINERS - 1), MAX_CONTAINERS)
    with pytest.raises(InvalidRequest, match=f"has more than {MAX_CONTAINERS} arrays and objects"):
        shape_of([[]] * MAX_CONTAINERS)
    with pytest.raises(InvalidRequest, match="arrays and objects"):
        check_shape(b"]" * (1 << 20), 0)


def test_depth_is_bounded() -> None:
    check_shape(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + BLANKS, 0)
    check_shape(b"[" + b"[]," * 1000 + b"[]]" + BLANKS, 0)
    with pytest.raises(InvalidRequest, match=f"nested too deeply: more than {MAX_DEPTH} levels"):
        check_shape(b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1) + BLANKS, 0)


def test_no_array_is_longer_than_the_longest_context() -> None:
    shape_of({"prompt": [1] * 50_000}, 50_000)
    shape_of({"prompt": [[1] * 50_000] * 3}, 50_000)
    with pytest.raises(ContextOverflow, match=r"maximum context length is 50000 tokens.*array of 50001 items or more"):
        shape_of({"prompt": [[1] * 50_001, [1]]}, 50_000)
    shape_of([1] * MIN_ITEMS, 512)  # a short context does not keep honest lists out


def test_numbers_are_bounded_in_all() -> None:
    """Arrays that are each short enough had 4 million, which kept the interpreter for 80 ms in one call."""
    row = [1] * 32_768
    shape_of({"prompt": [row] * 16})
    shape_of({"input": ["x"] * (MAX_STRINGS - 1)}, MAX_STRINGS)
    shape_of({"prompt": [1] * (MAX_NUMBERS + 1000)}, MAX_NUMBERS + 1000)  # one prompt may fill the longest context
    with pytest.raises(InvalidRequest, match=f"has more than {MAX_NUMBERS} numbers"):
        shape_of({"prompt": [row] * 17})


def test_numbers_that_take_long_are_bounded() -> None:
    """Half a million integers, or floats as they are written mostly, are none of them."""
    shape_of({"prompt": [12_345.678, True, False, None] * 8_000, "input": ["1e5"] * 4_000})
    shape_of([1e-7] * MAX_EXPONENTS + [10**MAX_DIGITS - 1])
    with pytest.raises(InvalidRequest, match=f"has more than {MAX_EXPONENTS} numbers with an exponent"):
        shape_of([1e-7] * (MAX_EXPONENTS + 1))
    with pytest.raises(InvalidRequest, match=f"has a number of more than {MAX_DIGITS} digits"):
        shape_of([10**MAX_DIGITS])


@pytest.mark.serial
def test_numbers_at_the_limits_of_floats_take_no_longer_than_python_reading_them() -> None:
    """msgspec's own reading of them takes twenty times as long, and holds the interpreter all the while."""
    texts = ["5e-324"] * 20_000
    began = time.process_time()
    floats = [float(text) for text in texts]
    read = time.process_time()
    assert read_object(b'{"a":[%s]}' % ",".join(texts).encode())["a"] == floats
    assert time.process_time() - read < 8 * (read - began)
    with pytest.raises(InvalidRequest, match="Number out of range"):
        read_object(b'{"a":[1e400]}')


@pytest.mark.parametrize("space", ["", " "])
@pytest.mark.parametrize(
    "row", [["a"] * 40_000, [{}, *["a, b"] * 40_000], {f"a{number}": number for number in range(40_000)}]
)
def test_what_has_no_tokens_is_not_called_a_long_prompt(row: object, space: str) -> None:
    body = json.dumps({"messages": [[1, 2]], "x": row, "n": 1}, separators=("," + space, ":" + space)).encode()
    with pytest.raises(InvalidRequest, match="32768 items in one array, or fields in one object") as caught:
        check_shape(body, 0)
    assert not isinstance(caught.value, ContextOverflow)


def test_what_a_body_takes_in_memory_is_no_less_than_its_text() -> None:
    assert shape_of("a" * 100_000)[1] >= 100_000
    wide = json.dumps(["a" * 100_000 + "\U0001f600"])
    assert check_shape(wide.encode(), 0).held_bytes >= 400_000
    assert check_shape(json.dumps(["a" * 100_000 + "\U0001f600"], ensure_ascii=False).encode(), 0).held_bytes >= 400_000
    assert shape_of([12_345] * 20_000)[1] >= 20_000 * 16


@pytest.mark.parametrize(
    "item", ["[]", "[0]", "[[[0]]]", "{}", '{"":0}', '{"a":{"b":[]}}', '"ab"', '"é"', '"\\\\"', "1000", "1.5"]
)
def test_what_a_short_body_takes_in_memory_is_counted(item: str) -> None:
    body = ("[" + ",".join([item] * ((UNCHECKED_BYTES - 2) // (len(item.encode()) + 1))) + "]").encode()
    tracemalloc.start()
    decoded = decode_json(body)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(decoded, list)
    assert taken <= unchecked_held_bytes(body) <= 8 * taken + UNCHECKED_FACTOR * UNCHECKED_BYTES


def test_brackets_in_the_text_of_a_short_body_take_nothing() -> None:
    text = json.dumps({"prompt": '{"[' * 1000})
    assert unchecked_held_bytes(text.encode()) < 5 * len(text)


@pytest.mark.parametrize("large", LARGE_BODIES, ids=lambda large: large.name)
def test_refusing_takes_no_time(large: LargeBody) -> None:
    body, began = large.of(), time.process_time()
    with pytest.raises(InvalidRequest):
        check_shape(body, 131_072)
    assert time.process_time() - began < 1.0


PIECES = [b'"', b'"', b"\\", b"\\\\", b'\\"', b",", b"[", b"]", b"{", b"}", b"1", b"x", b"\xe4\xbd\xa0", b"\\u4f60"]
RARE_PIECES = [
    b"\xf0\x9f\x98\x80",
    b"\\uD83d",
    b"\\ud",
    b"8",
    b"e",
    b"7" * 60,
    b"2E1 " * 500,
    b"," * 20_000,
    b"[" * 60,
    b"]" * 60,
    b'"",' * 30_000,
]


def judged(parts: list[bytes]) -> Shape | None:
    """Return what they hold; None: they are refused, for whichever fault comes first."""
    check = ShapeCheck(0)
    try:
        for part in parts:
            check.add(part)
    except InvalidRequest:
        return None
    return check.shape()


def test_it_makes_no_difference_where_a_body_is_cut() -> None:
    chance, told = random.Random(7), set[bool]()
    for _ in range(500):
        weights = [chance.random() ** 3 for _ in PIECES] + [chance.random() / 20 for _ in RARE_PIECES]
        raw = b"".join(chance.choices(PIECES + RARE_PIECES, weights, k=chance.choice([5, 20, 60])))
        places = sorted(chance.randrange(len(raw) + 1) for _ in range(chance.choice([1, 3, 20])))
        parts = [raw[a:b] for a, b in zip([0, *places], [*places, len(raw)], strict=True)]
        told.add(judged([raw]) is None)
        assert judged(parts) == judged([raw]), raw[:1000]
    assert told == {True, False}


@pytest.mark.serial
@pytest.mark.parametrize("large", LARGE_BODIES, ids=lambda large: large.name)
def test_no_slice_takes_long(large: LargeBody) -> None:
    """Nothing else happens in the process meanwhile, streams of others included."""
    check, took_s = ShapeCheck(4096), list[float]()
    for piece in slices(large.of(2 << 20)):
        refused, began = True, time.thread_time()
        with contextlib.suppress(InvalidRequest):
            check.add(piece)
            refused = False
        took_s.append(time.thread_time() - began)
        if refused:
            break
    assert refused
    assert max(took_s) < 0.015


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
