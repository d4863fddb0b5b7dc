"""Packs names for scripts, reads long answers of Redis, and pauses long work so that the event loop is not blocked.

The scripts `members` and `records` pack many answers into one string, which takes a fraction of the time of that many
separate answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from struct import Struct
from urllib.parse import unquote

from gateway.store.outage import NO_ANSWER, Unreadable
from gateway.store.scripts import load_members_script
from gateway.telemetry.metrics import Unread
from workers.redis.long_commands import LongCommands

MOST_FIELDS, MOST_BYTES = 1024, 8 << 20

_SPECIAL = str.maketrans({"%": "%25", "|": "%7C", "\n": "%0A", "\0": "%00"})
_NOT_SPECIAL = frozenset("%|\n\0")


def packed_team(team: str) -> str:
    """Return a team's name without the characters that separate the parts of a record in lua/shared.lua, and without
    NUL, at which Lua's `string.format` cuts a text off."""
    return team.translate(_SPECIAL) if not _NOT_SPECIAL.isdisjoint(team) else team


def unpacked_team(packed: str) -> str:
    """Return the team's name from what `packed_team` has made of it."""
    return unquote(packed)


NOTHING, THERE, TOO_LONG, OF_ANOTHER_TYPE = range(4)
"""The possible results of the scripts `members` and `records` for one key."""

_HEADER = Struct(">BI")
_LENGTH = Struct(">I")


def unpacked_keys(packed: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield for each key in the reply what was found, and bytes: for THERE the value, for TOO_LONG the value's size as
    text, for OF_ANOTHER_TYPE Redis's error as text, for NOTHING none."""
    at = 0
    while at < len(packed):
        what, length = _HEADER.unpack_from(packed, at)
        at += _HEADER.size + length
        yield what, packed[at - length : at]


def unpacked_texts(packed: bytes) -> Iterator[bytes]:
    """Yield the texts that the script `members` returns for one key: first the cursor from which to read on ("0" at the
    end), then a set's members, or a hash's fields and values in turn."""
    at = 0
    while at < len(packed):
        (length,) = _LENGTH.unpack_from(packed, at)
        at += _LENGTH.size + length
        yield packed[at - length : at]


LONGEST_S = 0.005
"""Seconds of work after which a task rests for equally long: it then uses at most half of the event loop's time."""


class Pauses:
    """Counts how long one task has worked since its last pause. Call `begin` after each `await`: other tasks have run
    meanwhile."""

    __slots__ = ("_begun", "worked_s")

    def __init__(self) -> None:
        self._begun = time.thread_time()
        self.worked_s = 0.0
        """Total seconds of work so far, up to the last pause."""

    def begin(self) -> None:
        """Count the task's work from now on."""
        self._begun = time.thread_time()

    async def rest(self) -> None:
        """Rest for as long as the task has worked, if that was at least LONGEST_S; else return at once."""
        took_s = time.thread_time() - self._begun
        if took_s >= LONGEST_S:
            self.worked_s += took_s
            await asyncio.sleep(took_s)
            self._begun = time.thread_time()


async def read_hash(
    commands: LongCommands, name: str, kind: Unread, unreadable: Unreadable, longest_bytes: int
) -> Mapping[bytes, bytes]:
    """Return the fields of a hash: at most MOST_FIELDS, and MOST_BYTES together. Raises redis.RedisError, OSError.

    Fields longer than `longest_bytes` are left out. Each of them is counted as unreadable (`kind`), and a hash with too
    many fields once."""
    source = load_members_script().source
    call = ("EVAL", source, 1, name, "hash", longest_bytes, 2 * MOST_FIELDS, MOST_BYTES, b"0")
    (answer,) = await commands.ask(call)
    if isinstance(answer, NO_ANSWER):
        raise answer
    found: dict[bytes, bytes] = {}
    pauses = Pauses()
    for what, packed in unpacked_keys(answer):
        if what == OF_ANOTHER_TYPE:
            unreadable.skip(kind, name, packed)
            continue
        texts = unpacked_texts(packed)
        if next(texts) != b"0":
            unreadable.skip(kind, name, "its fields are too many to be read at once")
        for field, value in zip(texts, texts, strict=False):
            if max(len(field), len(value)) > longest_bytes:
                unreadable.skip(kind, field, f"it has more than {longest_bytes} bytes")
            else:
                found[field] = value
            await pauses.rest()
    return found
