"""Files are cut out of bodies while these come in: all of them, nothing else, and nothing is lost."""

from __future__ import annotations

import base64
import json
import random
import time
from hashlib import sha256
from typing import Any

import pytest

from gateway.api.intake.body import slices
from gateway.api.media.sieve import LEAST_BYTES, Cut, MediaSieve, restored
from tests.support.sent_media import base64_of, data_url, picture

LONG = picture(LEAST_BYTES + 1000)
FIELDS = ("url", "image_url", "data", "file_data")


def sifted(raw: bytes, *sizes: int) -> tuple[bytes, dict[str, Cut]]:
    """Return what is left of a body that comes in pieces of these sizes, the last of which repeats, and its files."""
    sieve, kept, start, number = MediaSieve(), [], 0, 0
    while start < len(raw):
        size = sizes[min(number, len(sizes) - 1)]
        kept.append(sieve.feed(raw[start : start + size]))
        start, number = start + size, number + 1
    kept.append(sieve.finish())
    return b"".join(kept), sieve.cuts


def assert_same(raw: bytes, *sizes: int, num_files: int) -> dict[str, Cut]:
    text, cuts = sifted(raw, *sizes)
    assert len(cuts) == num_files
    assert json.loads(b"".join(restored(text, cuts))) == json.loads(raw)
    return cuts


@pytest.mark.parametrize("size", [1 << 20, 4096, 1000, 7, 1])
@pytest.mark.parametrize("field", FIELDS)
def test_a_file_is_cut_out_however_it_comes(field: str, size: int) -> None:
    for value in (base64_of(LONG), data_url(LONG), data_url(LONG, "image/svg+xml;charset=utf-8")):
        raw = json.dumps({"a": "b", field: value, "c": [1, {"d": 'e"f\\'}]}).encode()
        (cut,) = assert_same(raw, size, num_files=1).values()
        assert (cut.data, cut.sha256) == (LONG, sha256(LONG).digest())


@pytest.mark.parametrize("num_more", range(4))
def test_every_length_of_padding_is_kept(num_more: int) -> None:
    data = LONG + bytes(num_more)
    (cut,) = assert_same(json.dumps({"url": data_url(data)}).encode(), 999, num_files=1).values()
    assert cut.data == data


@pytest.mark.parametrize("indent", [None, 4])
def test_all_files_of_an_array_are_cut_out(indent: int | None) -> None:
    prompts = [
        {"prompt_string": "x" * 3000, "multimodal_data": [base64_of(picture(5000, n)), "c2hvcnQ=", data_url(LONG)]}
        for n in range(3)
    ]
    raw = json.dumps({"prompt": prompts}, indent=indent).encode()
    for size in (100_000, 1500, 100):
        assert_same(raw, size, num_files=6)


def test_slashes_may_be_escaped() -> None:
    """As PHP does by default."""
    raw = json.dumps({"url": data_url(LONG)}).encode().replace(b"/", b"\\/")
    for size in (1 << 20, 11, 1):
        (cut,) = assert_same(raw, size, num_files=1).values()
        assert cut.data == LONG


@pytest.mark.parametrize(
    "document",
    [
        {"text": "A" * 9000},
        {"content": 'she said "url": "' + "A" * 9000},
        {"url": base64_of(LONG[: LEAST_BYTES - 1])},
        {"url": ""},
        {"data": "no base64! " * 1000},
        {"data": 'a"b\\' * 3000},
        {"data": "====" * 3000},
        {"multimodal_data": []},
        {"url": None, "data": {"data": 1}},
    ],
)
def test_other_texts_stay(document: dict[str, Any]) -> None:
    raw = json.dumps(document).encode()
    for size in (1 << 20, 333, 1):
        text, cuts = sifted(raw, size)
        assert (text, cuts) == (raw, {})


@pytest.mark.parametrize("end", ["!", " more words", "\n", "==", "=" * 9, "A", "AA", "AAA="])
def test_what_only_begins_as_a_file_comes_back_whole(end: str) -> None:
    raw = json.dumps({"data": "QUJD" * 3000 + end, "b": 1}).encode()
    for size in (1 << 20, 4001, 64):
        text, cuts = sifted(raw, size)
        assert b"".join(restored(text, cuts)) == raw


def test_the_last_group_comes_back_as_it_was_sent() -> None:
    """`QR==` and `QQ==` stand for the same byte."""
    raw = json.dumps({"data": "QUJD" * 3000 + "QR=="}).encode()
    text, cuts = sifted(raw, 4096)
    assert len(cuts) == 1
    assert b"".join(restored(text, cuts)) == raw


def test_nobody_can_write_a_token() -> None:
    first, cuts = sifted(json.dumps({"url": data_url(LONG)}).encode(), 4096)
    (token,) = cuts
    assert token.encode() in first
    raw = json.dumps({"text": token, "url": data_url(LONG)}).encode()
    text, others = sifted(raw, 4096)
    assert token not in others
    assert b"".join(restored(text, others)) == raw


def test_a_body_that_ends_within_a_file_is_no_json() -> None:
    text, _ = sifted(b'{"url":"' + base64.b64encode(LONG), 1000)
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)


def test_anything_comes_back_as_it_was() -> None:
    draw = random.Random(5)
    pieces = [
        '"url":"',
        '"data": "',
        "QUJD" * 1500,
        "QUI=",
        '"',
        "\\",
        "\\/",
        '\\"',
        ",",
        "[",
        '"multimodal_data":["',
        " ",
    ]
    for _ in range(2000):
        raw = "".join(draw.choices(pieces, k=12)).encode()
        text, cuts = sifted(raw, draw.choice((1 << 20, 1000, 50)))
        assert meant(b"".join(restored(text, cuts))) == meant(raw)


def meant(raw: bytes) -> bytes:
    """Return JSON text without the escapes of slashes."""
    return raw.replace(b"\\\\", b"\0").replace(b"\\/", b"/")


LONGEST_SLICE_S = 0.005
TRIES = 3
WORST = {
    "short texts": b'"url":"A",' * 100_000,
    "fragments": (b'"data":"' + b"A" * 513 + b'!",') * 2_000,
    "small files": (b'"data":"' + b"A" * 600 + b'",') * 2_000,
    "names": b'"url": ' * 200_000,
    "quotes": b'"' * 1_000_000,
    "short items": b'"multimodal_data":["' + b"A" * 520 + b'"' + b',"A"' * 200_000,
    "escaped slashes": (b'"data":"' + b"\\/" * 300) * 5_000,
    "heads of URLs": (b'"url":"data:' + b"a" * 250) * 5_000,
}


@pytest.mark.serial
@pytest.mark.parametrize("body", WORST.values(), ids=WORST)
def test_no_slice_holds_the_loop_for_long(body: bytes) -> None:
    assert min(longest_slice_s(body) for _ in range(TRIES)) < LONGEST_SLICE_S


def longest_slice_s(body: bytes) -> float:
    sieve, longest_s = MediaSieve(), 0.0
    for piece in slices(body):
        began = time.thread_time()
        sieve.feed(piece)
        longest_s = max(longest_s, time.thread_time() - began)
    return longest_s
