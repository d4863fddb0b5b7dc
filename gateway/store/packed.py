"""Reads long answers of Redis, and rests between parts of the work.

The scripts `members` and `records` put many answers into one string, which takes a fraction of the time of as many.
"""

from __future__ import annotations

import asyncio
import time
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


LONGEST_S = 0.005
"""Seconds of work after which a task rests as long: it takes half of the event loop at most."""


class Pauses:
    """Counts the work of one task since its last pause. Begin anew after each `await`: others have worked meanwhile."""

    __slots__ = ("_begun", "worked_s")

    def __init__(self) -> None:
        self._begun = time.thread_time()
        self.worked_s = 0.0
        """Seconds of all work before a pause."""

    def begin(self) -> None:
        """Count from now on."""
        self._begun = time.thread_time()

    async def rest(self) -> None:
        """Rest as long as the work took, where it took LONGEST_S; else go on."""
        took_s = time.thread_time() - self._begun
        if took_s >= LONGEST_S:
            self.worked_s += took_s
            await asyncio.sleep(took_s)
            self._begun = time.thread_time()
