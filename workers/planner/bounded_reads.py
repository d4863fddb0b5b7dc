"""Reads what others have written into Redis, as far as it is of a size that they write.

Whoever has the login of a gateway, supervisor or worker can write fields without number, or of any length, there. All
is read in one round trip as long as it is small. Once it was not, lengths are asked for first, until nothing is too
long any more: what is, and one field of too many, is left out, counted, and named in the log once. What is longer than
any of it is cut off by the client (`workers.redis.bounded_answers`). If not even the names of a hash's fields can be
read, the hash is rewritten with only the fields that are known. No other field could have been read, and its gateway or
machine writes it again. Where names are too long or too many again and again, the known fields are read by their names,
and all names seldom: whoever writes them without pause has no supervisor read or rewrite them without pause.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import redis.asyncio

from workers.protocol.residency import LONGEST_TOLD
from workers.redis.bounded_answers import AnswerTooLong

MOST_BYTES = 16 << 20
"""Maximum bytes of a hash's fields together; others are left out."""
MOST_FIELDS, LONGEST_NAME = 1024, 512
"""Maximum number of fields of a hash, and bytes of a field's name; others are left out."""
LONGEST_ANSWER = 20 << 20
"""Bytes after which an answer is cut off, and its connection closed."""
CAREFUL_S = 60.0
"""Seconds for which lengths are asked for first after something was too long."""
AGAIN_S = 0.5
"""Seconds for which a hash is not read again meanwhile: finding out what of it is small can take long."""
MAX_PAUSE_S = 8.0
"""Maximum seconds for which the names of a hash are not read after there were too many, or too long ones: AGAIN_S at
first, twice as long each time."""
CALM_S = 2 * MAX_PAUSE_S
"""Seconds without such names after which the next pause is as short as the first."""
MOST_TOLD = 100
"""Maximum number of fields that are named in the log."""

Field = tuple[str, str]
"""A hash, and one of its fields."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reading:
    """The hashes and fields that one pipeline asks for."""

    hashes: tuple[str, ...]
    fields: tuple[Field, ...]
    is_careful: bool


@dataclass(frozen=True, slots=True)
class _Pause:
    """A time in which the names of a hash are not read, only the fields that were known before."""

    since: float
    length_s: float
    fields: tuple[bytes, ...]


@dataclass(slots=True)
class BoundedReads:
    """Reads what other processes have written, as far as it is not too much."""

    client: redis.asyncio.Redis
    num_skipped: int = 0
    """How often a field was left out."""
    _careful_until: float = float("-inf")
    _known: dict[str, dict[bytes, bytes]] = field(default_factory=dict)
    """Hash -> what was read of it last: these fields come first where there are more than are read."""
    _read_at: dict[str, float] = field(default_factory=dict)
    _pauses: dict[str, _Pause] = field(default_factory=dict)
    """Hash -> the last pause in reading its names."""
    _told: set[tuple[str, bytes]] = field(default_factory=set)

    def be_careful(self) -> None:
        """Ask for lengths first from now on: something was too long."""
        self._careful_until = time.monotonic() + CAREFUL_S

    def ask(self, pipeline: Any, hashes: Sequence[str], fields: Sequence[Field]) -> Reading:
        """Add the commands whose answers `found` takes."""
        reading = Reading(tuple(hashes), tuple(fields), time.monotonic() < self._careful_until)
        for name in hashes:
            if not reading.is_careful:
                pipeline.hgetall(name)
        for name, one in fields:
            pipeline.hstrlen(name, one) if reading.is_careful else pipeline.hget(name, one)
        return reading

    async def found(
        self, reading: Reading, answers: Sequence[Any]
    ) -> tuple[list[dict[bytes, bytes]], list[bytes | None]]:
        """Return what the hashes and fields of a reading have. Raises redis.RedisError, OSError."""
        for answer in answers:
            if isinstance(answer, AnswerTooLong):  # a Cluster's client has it in place of the answer
                raise answer
        if reading.is_careful:
            hashes = [await self._careful(name) for name in reading.hashes]
            return hashes, await self._short(reading.fields, answers)
        of_hashes, of_fields = answers[: len(reading.hashes)], answers[len(reading.hashes) :]
        hashes = [self._kept(name, found) for name, found in zip(reading.hashes, of_hashes, strict=True)]
        values = zip(reading.fields, of_fields, strict=True)
        return hashes, [self._value(*place, value) for place, value in values]

    async def hash(self, name: str) -> dict[bytes, bytes]:
        """Return what one hash has. Raises redis.RedisError, OSError."""
        return (await self._read((name,), ()))[0][0]

    async def values(self, fields: Sequence[Field]) -> list[bytes | None]:
        """Return the values of fields, asking for their lengths first. Raises redis.RedisError, OSError."""
        async with self._pipeline() as pipeline:
            for name, one in fields:
                pipeline.hstrlen(name, one)
            lengths = await pipeline.execute(raise_on_error=False)
        return await self._short(fields, lengths)

    async def _read(
        self, hashes: Sequence[str], fields: Sequence[Field]
    ) -> tuple[list[dict[bytes, bytes]], list[bytes | None]]:
        try:
            async with self._pipeline() as pipeline:
                reading = self.ask(pipeline, hashes, fields)
                answers = await pipeline.execute(raise_on_error=False)
            return await self.found(reading, answers)
        except AnswerTooLong:
            self.be_careful()
            raise

    async def _careful(self, name: str) -> dict[bytes, bytes]:
        """Return the short fields of a hash."""
        known = self._known.get(name, {})
        if not self._is_due(name):
            return known
        pause = self._pauses.get(name)
        if pause is not None and time.monotonic() - pause.since < pause.length_s:
            return self._kept(name, await self._short_of(name, pause.fields))
        names = await self._names(name)
        if names is None:
            found = self._kept(name, await self._short_of(name, known))
            self._pause(name)
            await self._rewrite(name, found)
            return found
        chosen = list[bytes]()
        for one in sorted(names, key=lambda one: one not in known):
            if len(one) > LONGEST_NAME:
                self._skip(name, one, f"its name has {len(one):,} bytes")
            elif len(chosen) >= MOST_FIELDS:
                self._skip(name, b"", f"it has {len(names):,} fields")
                break
            else:
                chosen.append(one)
        found = self._kept(name, await self._short_of(name, chosen))
        if len(names) > MOST_FIELDS or sum(map(len, names)) > MOST_FIELDS * LONGEST_NAME:
            self._pause(name)
        return found

    async def _names(self, name: str) -> list[bytes] | None:
        """Return the names of a hash's fields; None: they are too long to be read."""
        async with self._pipeline() as pipeline:
            pipeline.hkeys(name)
            try:
                answer = (await pipeline.execute(raise_on_error=False))[0]
            except AnswerTooLong:
                return None
        if isinstance(answer, AnswerTooLong):
            return None
        return answer if isinstance(answer, list) else list(self._known.get(name, ()))

    def _pause(self, name: str) -> None:
        """Read no names of a hash for a while, only the fields that are known."""
        now, last, known = self._read_at[name], self._pauses.get(name), [*self._known.get(name, ())]
        if last is None or now - last.since - last.length_s > CALM_S:
            self._pauses[name] = _Pause(now, AGAIN_S, tuple(known))
            return
        # A field that was known before may be missing for a moment: another supervisor has rewritten the hash.
        fields = dict.fromkeys([*known, *last.fields])
        self._pauses[name] = _Pause(now, min(MAX_PAUSE_S, 2 * last.length_s), tuple(islice(fields, MOST_FIELDS)))

    async def _short_of(self, name: str, names: Iterable[bytes]) -> dict[bytes, bytes]:
        """Return those of a hash's fields that are short, and together not too long."""
        asked = list(names)
        async with self._pipeline() as pipeline:
            for one in asked:
                pipeline.hstrlen(name, one)
            lengths = await pipeline.execute(raise_on_error=False) if asked else []
        found, total = list[bytes](), 0
        for one, length in zip(asked, lengths, strict=True):
            if self._is_short(name, one, length) and self._has_room(name, one, total + length):
                found.append(one)
                total += length
        async with self._pipeline() as pipeline:
            for one in found:
                pipeline.hget(name, one)
            values = await pipeline.execute(raise_on_error=False) if found else []
        return {one: value for one, value in zip(found, values, strict=True) if value is not None}

    async def _rewrite(self, name: str, fields: Mapping[bytes, bytes]) -> None:
        """Rewrite a hash with only these fields."""
        why = f"all names together have more than {LONGEST_ANSWER:,} bytes; only {len(fields):,} known fields are kept"
        self._skip(name, b"", why)
        async with self._pipeline() as pipeline:
            pipeline.unlink(name)
            if fields:
                pipeline.hset(name, mapping=dict(fields))
            await pipeline.execute(raise_on_error=False)

    async def _short(self, fields: Iterable[Field], lengths: Iterable[Any]) -> list[bytes | None]:
        """Return the values of fields of these lengths, None for those that are too long or not there."""
        places = list(zip(fields, lengths, strict=True))
        short = [place for place, length in places if length and self._is_short(*place, length)]
        async with self._pipeline() as pipeline:
            for name, one in short:
                pipeline.hget(name, one)
            values = dict(zip(short, await pipeline.execute(raise_on_error=False) if short else (), strict=True))
        return [self._value(*place, values.get(place)) for place, _ in places]

    def _kept(self, name: str, answer: Any) -> dict[bytes, bytes]:
        """Return what of a hash counts."""
        fields: Mapping[bytes, bytes] = answer if isinstance(answer, dict) else {}
        known, kept, total = self._known.get(name, {}), dict[bytes, bytes](), 0
        for one in fields if len(fields) <= MOST_FIELDS else sorted(fields, key=lambda one: one not in known):
            value = fields[one]
            if len(kept) >= MOST_FIELDS:
                self._skip(name, b"", f"it has {len(fields):,} fields")
                break
            if len(one) > LONGEST_NAME:
                self._skip(name, one, f"its name has {len(one):,} bytes")
            elif (
                isinstance(value, bytes)
                and self._is_short(name, one, len(value))
                and self._has_room(name, one, total + len(value))
            ):
                kept[one] = value
                total += len(value)
        self._known[name], self._read_at[name] = kept, time.monotonic()
        return kept

    def _value(self, name: str, one: str, value: Any) -> bytes | None:
        return value if isinstance(value, bytes) and self._is_short(name, one, len(value)) else None

    def _is_short(self, name: str, one: bytes | str, length: Any) -> bool:
        if not isinstance(length, int):
            return False
        if length > LONGEST_TOLD:
            self._skip(name, one, f"it has {length:,} bytes")
        return length <= LONGEST_TOLD

    def _has_room(self, name: str, one: bytes, total: int) -> bool:
        if total > MOST_BYTES:
            self._skip(name, one, f"all fields together have {total:,} bytes")
        return total <= MOST_BYTES

    def _skip(self, name: str, one: bytes | str, why: str) -> None:
        """Count a field that is left out, and name it in the log, once."""
        self.num_skipped += 1
        self.be_careful()
        shown = (one.encode() if isinstance(one, str) else one)[:64]
        if (name, shown) not in self._told and len(self._told) < MOST_TOLD:
            self._told.add((name, shown))
            log.warning(
                "what stands in Redis under %s, field %s, is left out: %s (%d are by now); see what else writes there",
                *(name, shown.decode("ascii", "backslashreplace") or "one of many", why, self.num_skipped),
            )

    def _is_due(self, name: str) -> bool:
        return time.monotonic() - self._read_at.get(name, float("-inf")) >= AGAIN_S

    def _pipeline(self) -> Any:
        return self.client.pipeline(transaction=False)
