"""Bounds of what a body may hold, checked on its bytes before anything of it is decoded.

Decoding makes an object of each string, array and object: 8 MiB hold 2.8 million of them, which take gigabytes and
half a minute once they are validated. Strings are taken out first, so text may have any number of commas and brackets.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass
from itertools import accumulate

from gateway.errors import ContextOverflow, InvalidRequest

MAX_STRINGS = 200_000
"""Names of fields included. Ten thousand messages of one part each have seventy thousand."""
MAX_CONTAINERS = 65_536
"""Arrays and objects."""
MAX_DEPTH = 128
MIN_ITEMS = 32_768
"""Numbers in an array that are let through even where every context is shorter."""
UNCHECKED_BYTES = 16 << 10
"""What is shorter can't hold enough to matter."""
UNCHECKED_FACTOR = 4
"""Memory that it is taken to hold, for each of its bytes."""

_STRUCTURE = b"[]{},"
_BRACKETS = b"[]{}"
_OTHERS = bytes(set(range(256)) - set(_STRUCTURE))
_NO_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
_STEPS = bytes.maketrans(_BRACKETS, b"\x01\xff\x01\xff")
_RUNS = re.compile(rb"[\[\]{}]+")


_WIDEST = re.compile(rb"[\xf0-\xff]|\\u[dD][89abAB]")
"""Characters that make all others of their string take four bytes."""
STRING_BYTES, CONTAINER_BYTES, NUMBER_BYTES = 64, 512, 16
"""What each takes beside its characters."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How much a body holds."""

    num_strings: int
    """0 for one that is too short to matter."""
    held_bytes: int
    """Memory that it takes at most when it is decoded."""


def check_shape(raw: bytes, max_items: int) -> Shape:
    """Return what decoding the body would make. `max_items`: tokens of the longest context that there is.

    Takes 5 ms per MiB at most, in calls of a few milliseconds. Raises InvalidRequest, ContextOverflow.
    """
    if len(raw) <= UNCHECKED_BYTES:
        return Shape(0, UNCHECKED_FACTOR * len(raw))
    text_bytes = len(raw) * _bytes_per_character(raw)
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = raw.count(b'"') // 2
    if num_strings > MAX_STRINGS:
        raise _too_many(num_strings, "strings, names of fields included", MAX_STRINGS)
    skeleton = b"".join(raw.split(b'"')[::2]).translate(None, _OTHERS)
    num_containers = max(
        skeleton.count(b"[") + skeleton.count(b"{"), skeleton.count(b"]") + skeleton.count(b"}")
    )  # not the same in what is no JSON
    if num_containers > MAX_CONTAINERS:
        raise _too_many(num_containers, "arrays and objects", MAX_CONTAINERS)
    _check_depth(skeleton)
    _check_items(skeleton, max(MIN_ITEMS, max_items))
    held_bytes = text_bytes + num_strings * STRING_BYTES + num_containers * CONTAINER_BYTES
    return Shape(num_strings, held_bytes + max(0, skeleton.count(b",") - num_strings // 2) * NUMBER_BYTES)


def _bytes_per_character(raw: bytes) -> int:
    if raw.isascii() and b"\\u" not in raw:
        return 1
    return 4 if _WIDEST.search(raw) else 2


def _check_depth(skeleton: bytes) -> None:
    brackets = skeleton.translate(None, b",")
    depth = max(accumulate(array("b", brackets.translate(_STEPS))), default=0)
    if depth > MAX_DEPTH:
        message = (
            f"The body is nested too deeply: {depth} levels; the limit is {MAX_DEPTH}. Send a flatter JSON object."
        )
        raise InvalidRequest(message)


def _check_items(skeleton: bytes, max_items: int) -> None:
    """Strings, arrays and objects are bounded in all: a longer array is one of numbers."""
    if skeleton.count(b",") < max_items:
        return
    longest = max(map(len, _RUNS.split(skeleton))) + 1
    if longest > max_items:
        message = (
            f"The body has an array of {longest} items; the longest context here has {max_items} tokens, and no array "
            "may be longer. Send less."
        )
        raise ContextOverflow(message, num_prompt_tokens=longest, n_ctx=max_items)


def _too_many(number: int, what: str, limit: int) -> InvalidRequest:
    return InvalidRequest(f"The body has {number} {what}; one request takes {limit}. Send several requests.")
