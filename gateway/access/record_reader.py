"""Reads the records of access from Redis: keys, and the subjects of limits. A gateway's copies follow every change.

One command asks for all changes since the last one. All records are read as well, in pieces, while this goes on: at the
start, where Redis has lost the versions of changes, after a failure, where the number of records shows that somebody
wrote one without a version, and every REREAD_S.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Container, Iterator, Sequence
from time import monotonic, thread_time
from typing import Any, Protocol

import redis.asyncio
from redis.exceptions import ResponseError

from accounts.protocol import changes
from gateway.store.packed import OF_ANOTHER_TYPE, unpacked_keys, unpacked_texts
from gateway.store.scripts import load_access_changes_script, load_members_script
from workers.protocol import keys
from workers.redis.link import long_commands_of

POLL_S = 0.4
REREAD_S, LEAST_REREAD_S = 120.0, 3.0
"""Seconds from one reading of all records to the next if nothing else asks for it, and at least."""
POLL_TIMEOUT_S = 1.0
MAX_CHANGES = 256
"""Maximum changes, and maximum names to look for, in one command."""
PIECE_TEXTS, PIECE_BYTES = 512, 128 << 10
"""Numbers of texts and bytes after which a piece of a hash ends. Redis takes 0.3 ms for it, a gateway 1 to 2 ms."""
LONGEST_BYTES = 4 << 20
"""Maximum bytes of a record. Of a longer one only the beginning is read, which is no valid record."""
NUM_PARTS = 64


class Copy(Protocol):
    """A gateway's copy of one hash in Redis."""

    def __len__(self) -> int:
        """Return the number of fields, valid or not."""
        ...

    def names(self) -> Iterator[list[bytes]]:
        """Yield the names of all fields, some at a time; the copy may change in between."""
        ...

    def put(self, name: bytes, value: bytes) -> None:
        """Take what Redis has in a field; it may be the same as before."""
        ...

    def remove(self, name: bytes) -> None:
        """Forget a field, which Redis does not have; the copy may not have it either."""
        ...


class RecordReader:
    """Keeps two copies as Redis has the hashes. Answers are taken in the order in which Redis gave them, so that no
    piece that was read earlier undoes a later change."""

    def __init__(self, redis: redis.asyncio.Redis, of_keys: Copy, of_subjects: Copy) -> None:
        self._commands = long_commands_of(redis)
        self._of_keys, self._of_subjects = of_keys, of_subjects
        self._changes, self._members = load_access_changes_script().source, load_members_script().source
        self._version = b"0"
        """The version up to which all changes are known, as Redis writes it."""
        self._begun = b""
        """The member of the changes that tells since when there are versions."""
        self._was_complete = False
        """Whether an accounts service has published all that its database has, as the position in Redis told once."""
        self._is_stale = True
        """Whether there may be changes that have no version above the known one."""
        self._read_at = -math.inf
        self._followed_at = -math.inf

    async def read(self) -> None:
        """Take the changes since the last time and, if that is due, read all records.

        Raises redis.RedisError or OSError if Redis is away."""
        is_stale, self._is_stale = self._is_stale, True  # until this is complete
        if self._begun:
            is_stale |= await self._follow()
        since_s = monotonic() - self._read_at
        if since_s >= REREAD_S or (is_stale and since_s >= LEAST_REREAD_S):
            is_stale = not await self._read_all()
        self._is_stale = is_stale

    async def _follow(self) -> bool:
        """Take all changes since the known version. Return whether there seem to be others that have none."""
        while True:
            numbers, told, begun = await self._changed()
            for member, version, record in told:
                copy, name = self._place_of(member)
                if record:
                    copy.put(name, record)
                else:
                    copy.remove(name)
                self._version = version
            if len(told) < MAX_CHANGES:
                break
            await asyncio.sleep(0)
        self._followed_at = monotonic()
        copied = (len(self._of_keys), len(self._of_subjects))
        return begun != self._begun or any(number not in (-1, own) for number, own in zip(numbers, copied, strict=True))

    async def _changed(self) -> tuple[Sequence[int], list[tuple[bytes, bytes, bytes]], bytes]:
        """Return the numbers of keys and subjects, the next changes, and since when there are versions."""
        places = (keys.ACCESS_KEYS, keys.ACCESS_SUBJECTS, keys.ACCESS_CHANGES)
        call = ("EVAL", self._changes, len(places), *places, self._version, MAX_CHANGES)
        num_keys, num_subjects, *rest = await self._ask(*call, timeout_s=POLL_TIMEOUT_S)
        told = list(zip(rest[::3], rest[1::3], rest[2::3], strict=True))
        begun = told.pop()[0] if told and told[-1][1] == b"inf" else b""
        return (num_keys, num_subjects), told, begun

    def _place_of(self, member: bytes) -> tuple[Copy, bytes]:
        of_key = member.startswith(changes.KEY.encode())
        return (self._of_keys, member[len(changes.KEY) :]) if of_key else (self._of_subjects, member)

    async def _read_all(self) -> bool:
        """Read all records. Return whether Redis has all of them: not while an accounts service writes them anew."""
        await self._ask(*changes.command(()))  # from now on there are versions
        *last, begun = await self._ask("ZRANGE", keys.ACCESS_CHANGES, -2, -1)
        if begun != self._begun:
            version = await self._ask("ZSCORE", keys.ACCESS_CHANGES, *last) if last else 0
            self._begun, self._version = begun, b"%.0f" % float(version)
        # Subjects first: with its first call a new key has its team's limits.
        is_complete = await self._read_hash(keys.ACCESS_SUBJECTS, self._of_subjects)
        is_complete &= await self._read_hash(keys.ACCESS_KEYS, self._of_keys)
        self._read_at = monotonic()
        return is_complete

    async def _read_hash(self, place: str, copy: Copy) -> bool:
        cursor, seen = b"", _Seen()
        while cursor != b"0":
            call = ("EVAL", self._members, 1, place, "hash", LONGEST_BYTES, PIECE_TEXTS, PIECE_BYTES, cursor or b"0")
            packed = await self._ask(*call)
            began_at = thread_time()
            ((what, piece),) = unpacked_keys(packed)
            if what == OF_ANOTHER_TYPE:
                raise ResponseError(piece.decode())
            texts = unpacked_texts(piece)
            cursor = next(texts)
            for name, value in zip(texts, texts, strict=True):
                copy.put(name, value)
                seen.add(name)
            await self._rest(thread_time() - began_at)
        return await self._look_for_unseen(place, copy, seen)

    async def _look_for_unseen(self, place: str, copy: Copy, seen: Container[bytes]) -> bool:
        """Look for each field that was not among the pieces: it was put meanwhile, is gone, or was missed, as a cursor
        of one server means something else at the next.

        What Redis has lost, and an accounts service writes anew, is kept: keys stay valid meanwhile. Return whether
        Redis has everything."""
        unseen = list[bytes]()
        for names in copy.names():
            unseen += (name for name in names if name not in seen)
            await asyncio.sleep(0)
        for first in range(0, len(unseen), MAX_CHANGES):
            some = unseen[first : first + MAX_CHANGES]
            values = await self._ask("HMGET", place, *some)
            is_complete = await self._is_complete()
            began_at = thread_time()
            for name, value in zip(some, values, strict=True):
                if value is not None:
                    copy.put(name, value)
                elif is_complete:
                    copy.remove(name)
            await self._rest(thread_time() - began_at)
        return await self._is_complete()

    async def _is_complete(self) -> bool:
        """Return whether Redis has all records of the database; always true where no accounts service publishes any."""
        position = await self._ask("GET", keys.ACCESS_POSITION)
        is_told = position is not None and changes.REBUILD not in position
        self._was_complete |= is_told
        return is_told or not self._was_complete

    async def _rest(self, took_s: float) -> None:
        """Leave the event loop to others for as long as a piece took, and take the changes if it is time for them."""
        await asyncio.sleep(took_s)
        if monotonic() - self._followed_at >= POLL_S:
            await self._follow()

    async def _ask(self, *command: str | int | bytes, timeout_s: float | None = None) -> Any:
        (answer,) = await self._commands.ask(command, timeout_s=timeout_s)
        if isinstance(answer, Exception):
            raise answer
        return answer


class _Seen:
    """A set in parts: when one of 100,000 items grows, it moves all of them at once, which takes 5 ms and more."""

    def __init__(self) -> None:
        self._parts: list[set[bytes]] = [set() for _ in range(NUM_PARTS)]

    def add(self, name: bytes) -> None:
        self._parts[hash(name) % NUM_PARTS].add(name)

    def __contains__(self, name: object) -> bool:
        return name in self._parts[hash(name) % NUM_PARTS]
