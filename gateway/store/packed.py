"""Reads what the scripts `members` and `records` tell in one string, which takes a fraction of as many answers."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

NOTHING, THERE, TOO_LONG, OF_ANOTHER_TYPE = range(4)
"""What the scripts tell of a key."""

_HEADER = Struct(">BI")
_LENGTH = Struct(">I")


def unpacked_keys(packed: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield for each key that was told what it is, and its bytes or why there are none."""
    at = 0
    while at < len(packed):
        what, length = _HEADER.unpack_from(packed, at)
        at += _HEADER.size + length
        yield what, packed[at - length : at]


def unpacked_texts(packed: bytes) -> Iterator[bytes]:
    """Yield the texts that `members` tells of a key: where to go on, then its members, or fields and values in turn."""
    at = 0
    while at < len(packed):
        (length,) = _LENGTH.unpack_from(packed, at)
        at += _LENGTH.size + length
        yield packed[at - length : at]
