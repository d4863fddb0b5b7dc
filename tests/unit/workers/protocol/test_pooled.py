"""Vectors that come over the wire are read a piece at a time, and are what one call would have decoded."""

from __future__ import annotations

import random

import msgspec
import pytest

from workers.protocol.pooled import PoolResult, ResultReader, decode_result, encode

RANDOM = random.Random(5)
RESULT = PoolResult(pooling="mean", width=5, rows=(1, 1), num_tokens=(3, 4), vectors=RANDOM.randbytes(40))


def read(raw: bytes, *cuts: int) -> PoolResult:
    reader = ResultReader()
    for start, end in zip((0, *cuts), (*cuts, len(raw)), strict=True):
        reader.add(raw[start:end])
    return reader.result()


@pytest.mark.parametrize("num_bytes", [0, 4, 8, 12, 40])
def test_it_may_be_cut_anywhere(num_bytes: int) -> None:
    result = msgspec.structs.replace(RESULT, vectors=RESULT.vectors[:num_bytes])
    raw = encode(result)
    assert read(raw) == result
    assert read(raw, *range(1, len(raw))) == result
    for cut in range(len(raw)):
        assert read(raw, cut) == read(raw, cut, min(cut + 7, len(raw))) == result


def test_vectors_are_counted_as_they_come() -> None:
    """A reader of many MiB can so refuse them before all of them are in memory."""
    raw, counts = encode(RESULT), list[int]()
    reader = ResultReader(counts.append)
    for start in range(0, len(raw), 8):
        reader.add(raw[start : start + 8])
    assert counts == sorted(counts)
    assert counts[-1] == len(RESULT.vectors)
    assert len(counts) > 3


def test_what_counting_raises_ends_the_reading() -> None:
    def hold(num_bytes: int) -> None:
        if num_bytes > 20:
            raise MemoryError

    reader, raw = ResultReader(hold), encode(RESULT)
    with pytest.raises(MemoryError):
        reader.add(raw)


def test_fields_may_stand_in_any_order_and_be_more() -> None:
    raw = b'{"vectors":"AAAA","new":"\\"vectors\\":\\"","rows":[1],"num_tokens":[1],"width":1,"pooling":"a\\"b"}'
    for cut in range(len(raw)):
        assert read(raw, cut) == decode_result(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"no",
        b"{}",
        b'{"vectors":7}',
        encode(RESULT)[:-1],
        encode(RESULT)[:-2],
        encode(RESULT)[:-3],
        encode(RESULT) + b"}",
        encode(RESULT).replace(b'"vectors":"', b'"vectors":"A'),
        encode(RESULT).replace(b'"vectors":"', b'"vectors":"AA=='),
        encode(RESULT).replace(b'"vectors":"', b'"vectors":"!!!!'),
        encode(RESULT).replace(b'"mean"', b"7"),
    ],
)
def test_what_is_no_result_is_told(raw: bytes) -> None:
    for cuts in ((), range(1, len(raw))):
        with pytest.raises(msgspec.DecodeError):
            read(raw, *cuts)
