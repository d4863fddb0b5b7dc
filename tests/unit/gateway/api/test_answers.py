"""Whole answers in parts: what is encoded already is never joined at once."""

from __future__ import annotations

import json

import msgspec

from gateway.api.answers import PART_BYTES, EncodedArray, in_parts


def test_what_is_encoded_already_is_joined_part_by_part() -> None:
    """Joining and writing 20 MB at once held up every stream of a gateway for 150 ms."""
    entries = [{"number": number, "text": "y" * 1000} for number in range(5000)]
    encoded = EncodedArray([msgspec.json.encode(entry) for entry in entries])
    document = {"choices": [{"content": encoded, "last": 1}], "none": EncodedArray([]), "odd": "a\0b"}
    parts = list(in_parts(document))
    assert max(map(len, parts)) < 2 * PART_BYTES
    assert len(parts) > 5_000_000 // (2 * PART_BYTES)
    assert json.loads(b"".join(parts)) == {
        "choices": [{"content": entries, "last": 1}],
        "none": [],
        "odd": "a\0b",
    }


def test_a_document_without_such_arrays_is_one_part() -> None:
    assert list(in_parts({"a": [1, "\0"]})) == [b'{"a":[1,"\\u0000"]}']


def test_one_entry_may_be_longer_than_a_part() -> None:
    entry = msgspec.json.encode("x" * 3 * PART_BYTES)
    assert b"".join(in_parts(EncodedArray([entry, entry]))) == b"[" + entry + b"," + entry + b"]"
