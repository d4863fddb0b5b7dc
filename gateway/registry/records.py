"""Reads from Redis what workers write: records, prefix hashes, and their reports between two heartbeats (`pd:news`)."""

from __future__ import annotations

import logging
import random
import struct
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from struct import Struct
from typing import TypeVar

import redis.asyncio
from redis.exceptions import RedisError

from gateway.store.outage import NO_ANSWER, Unreadable, is_of_one_name
from gateway.store.packed import OF_ANOTHER_TYPE, THERE, TOO_LONG, Pauses, unpacked_keys, unpacked_texts
from gateway.store.scripts import load_members_script, load_news_script, load_records_script
from gateway.telemetry.metrics import Unread
from workers.protocol import keys
from workers.protocol.control import fits, seal_heartbeat
from workers.protocol.heartbeat import (
    BEAT,
    MAX_HEADS_BYTES,
    PROTOCOL_VERSION,
    SEAL,
    Heartbeat,
    News,
    NotSealed,
    decode_heartbeat,
    open_news,
    unpack_heads,
)
from workers.redis.link import cluster_of, long_commands_of

log = logging.getLogger(__name__)

MAX_NAMED = 256
"""Maximum number of workers that the log names as left out: anyone who can write to Redis can make up names."""
MAX_NAME_CHARS = 512
"""Maximum number of characters of a model's or worker's name; longer names are skipped."""
MOST_NAMES = 10_000
"""Number of names after which the reading of a Redis set stops; the next reading of this set goes on from there."""
NAMES_AT_ONCE = 512
"""Number of names to process before checking whether to rest (`Pauses.rest`)."""
MOST_STRANGERS = 10_000
"""Maximum number of unknown workers whose records one reading reads; if there are more, it takes a random sample."""
MOST_STRANGE_BYTES = 32 << 20
"""Bytes of unknown workers' records after which a reading of records stops. The largest fleet has far fewer."""
LONGEST_RECORD = 1 << 20
"""Maximum bytes of a record; longer ones are left out. A record with 4,096 adapters has half of that."""
ANSWER_BYTES = 2 << 20
"""Bytes per round trip to Redis, split evenly among its script calls; keys that do not fit wait for the next trip."""
KEYS_AT_ONCE = 1000
"""Maximum number of keys of one script call."""
ANSWERS_AT_ONCE = 16
"""Maximum number of script calls in one round trip."""

Item = TypeVar("Item")
WorkerKey = tuple[str, str]
"""The key of a worker: its model and its id."""

LATE_S = 1.0
"""A record that expires within so many seconds is late: its worker has missed several heartbeats in a row."""

_RECORD_HEADER = struct.Struct(">II")


@dataclass(frozen=True, slots=True)
class PrefixHashes:
    """The hashes of the prefixes that one worker has cached, as it last wrote all of them."""

    version: int
    """Number of the worker's last report (`News`) whose changes are included in these hashes."""
    tokens: Mapping[int, int]
    """Prefix hash -> number of tokens of the prefix."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names that were read from a set."""

    found: frozenset[str]
    are_all: bool = True
    """False: the set has too many names for one reading. `found` has some of them; the next reading finds others."""


class RecordReader:
    """Reads workers' records and prefix hashes.

    Leaves out, and logs once: workers of another protocol version, records that can't be read, and records that are not
    sealed with the worker secret for their key.

    Whoever has a worker's Redis login can write any number of names and bytes. So each reading is bounded, reads known
    workers first, and rests after some ms of work. Methods raise redis.RedisError. For use by one task at a time."""

    def __init__(
        self, redis: redis.asyncio.Redis, secret: str, refused: Callable[[], None], unreadable: Unreadable
    ) -> None:
        """`refused` is called for each record not sealed with `secret`; `unreadable` counts what can't be read."""
        self._commands = long_commands_of(redis)
        self._secret = secret
        self._refused = refused
        self._unreadable = unreadable
        self._is_cluster = cluster_of(redis) is not None
        """Whether Redis is a Cluster: then all keys of one script call must belong to one model."""
        self._left_out: set[WorkerKey] = set()
        self.late: set[WorkerKey] = set()
        """Workers whose records are late (LATE_S), of those read since `all` was last called."""
        self._members = load_members_script().source
        self._values_script = load_records_script().source
        self._from: dict[str, bytes] = {}
        """Key of a set with too many names -> SSCAN cursor from which the next reading goes on."""

    async def models(self) -> Names | None:
        """Return the models that have ever had a worker on this Redis; None if the key for their names holds no set."""
        (listed,) = [one async for one in self._names(Unread.MODELS, [keys.MODELS], Pauses())]
        return listed[1]

    async def all(
        self, models: Iterable[str], known: Mapping[str, Collection[str]], pauses: Pauses
    ) -> tuple[dict[WorkerKey, Heartbeat], frozenset[str]]:
        """Return the records of these models' workers, and the models whose list of workers can't be read. `known`:
        model -> its known workers."""
        self.late.clear()
        asked = {keys.workers(model): model for model in models}
        there: list[WorkerKey] = []
        strangers: list[WorkerKey] = []
        unread = set[str]()
        # In random order, here and below: if there is too much to read, each model and worker is read at some time.
        async with aclosing(self._names(Unread.WORKERS, _shuffled(asked), pauses)) as listed:
            async for name, names in listed:
                model = asked.pop(name)
                if names is None:
                    unread.add(model)
                    continue
                workers = known.get(model, ())
                there += [(model, worker) for worker in workers if worker in names.found or not names.are_all]
                strangers += [(model, worker) for worker in names.found if worker not in workers]
                if len(strangers) >= MOST_STRANGERS:
                    break
                await pauses.rest()
        there += [(model, worker) for model in asked.values() for worker in known.get(model, ())]
        await pauses.rest()
        strangers = _shuffled(strangers[: 2 * MOST_STRANGERS])[:MOST_STRANGERS]
        await pauses.rest()
        found = await self.some(there, pauses)
        return {**found, **await self.some(strangers, pauses, MOST_STRANGE_BYTES)}, frozenset(unread)

    async def some(
        self, workers: Iterable[WorkerKey], pauses: Pauses, most_bytes: int | None = None
    ) -> dict[WorkerKey, Heartbeat]:
        """Return the records of the workers that have one; stop when they exceed `most_bytes` (None: never)."""
        found: dict[WorkerKey, Heartbeat] = {}
        left = most_bytes
        async with aclosing(self._values(Unread.WORKER, workers, pauses)) as values:
            async for key, packed in values:
                left_ms, length = _RECORD_HEADER.unpack_from(packed)
                end = _RECORD_HEADER.size + length
                record, seal = packed[_RECORD_HEADER.size : end], packed[end:]
                beat = self._read(key, record, seal) if record else None
                if beat is not None:
                    found[key] = beat
                    if left_ms < LATE_S * 1000:
                        self.late.add(key)
                if left is not None and (left := left - len(packed)) < 0:
                    why = f"those of workers that are not known have more than {most_bytes} bytes"
                    self._unreadable.skip(Unread.WORKER, "some records", why)
                    break
        return found

    async def prefix_hashes(self, workers: Iterable[WorkerKey], pauses: Pauses) -> dict[WorkerKey, PrefixHashes]:
        """Return the prefix hashes of these workers; workers without readable prefix hashes are left out."""
        found: dict[WorkerKey, PrefixHashes] = {}
        async for key, packed in self._values(Unread.HEADS, workers, pauses):
            try:
                found[key] = PrefixHashes(*unpack_heads(packed))
            except (struct.error, ValueError) as error:
                self._unreadable.skip(Unread.HEADS, keys.worker_heads(*key), error)
        return found

    async def _names(
        self, kind: Unread, sets: Sequence[str], pauses: Pauses
    ) -> AsyncGenerator[tuple[str, Names | None]]:
        """Yield (key, names in it) for each of the sets; None in place of the names if the key holds no set."""

        def arguments(asked: Sequence[str], most_bytes: int) -> list[str | int | bytes]:
            return ["set", 4 * MAX_NAME_CHARS, MOST_NAMES, most_bytes, *(self._from.get(name, b"0") for name in asked)]

        groups = {name: [name] for name in sets} if self._is_cluster else {"": list(sets)}
        async for name, what, text in self._run_script(self._members, groups, arguments, pauses):
            begun_at = self._from.pop(name, b"0")
            if what == OF_ANOTHER_TYPE:
                self._unreadable.skip(kind, name, text)
                yield name, None
                continue
            texts = unpacked_texts(text)
            ends_at = next(texts)
            if ends_at != b"0":
                self._from[name] = ends_at
            if not (are_all := ends_at == begun_at == b"0"):
                why = "its names are too many to be read at once; delete it, and workers add theirs again"
                self._unreadable.skip(kind, name, why)
            names = set[str]()
            for number, one in enumerate(self._texts(kind, texts)):
                names.add(one)
                if number % NAMES_AT_ONCE == 0:
                    await pauses.rest()
            yield name, Names(frozenset(names), are_all)

    async def _values(
        self, kind: Unread, workers: Iterable[WorkerKey], pauses: Pauses
    ) -> AsyncGenerator[tuple[WorkerKey, bytes]]:
        """Yield workers' packed records, or prefix hashes if `kind` is HEADS. Missing or too long ones are left out."""
        fields: tuple[str, ...] = (BEAT, SEAL)
        name_of, longest = keys.worker, LONGEST_RECORD
        if kind is Unread.HEADS:
            name_of, longest, fields = keys.worker_heads, MAX_HEADS_BYTES, ()
        asked = {name_of(*key): key for key in workers}
        groups: dict[str, list[str]] = {}
        for name, key in asked.items():
            groups.setdefault(key[0] if self._is_cluster else "", []).append(name)

        def arguments(asked: Sequence[str], most_bytes: int) -> list[str | int | bytes]:
            return [longest, most_bytes, *fields]

        async for name, what, text in self._run_script(self._values_script, groups, arguments, pauses):
            if what == THERE:
                yield asked[name], text
            elif what in (TOO_LONG, OF_ANOTHER_TYPE):
                why = f"{text.decode()} bytes are too many" if what == TOO_LONG else text
                self._unreadable.skip(kind, name, why)

    async def _run_script(
        self,
        script: str,
        groups: dict[str, list[str]],
        arguments: Callable[[Sequence[str], int], list[str | int | bytes]],
        pauses: Pauses,
    ) -> AsyncGenerator[tuple[str, int, bytes]]:
        """Run a script on keys. Yield a tuple for each key: the key, what was found (THERE, ...), the value's bytes.

        `groups`: group -> its keys; one script call gets keys of one group. `arguments` returns a script call's
        arguments, given its keys and its reply's maximum bytes. After long work, the method rests before the next key.
        """
        while groups:
            asked = {group: groups[group][:KEYS_AT_ONCE] for group in list(groups)[:ANSWERS_AT_ONCE]}
            most_bytes = ANSWER_BYTES // len(asked)
            answers = await self._commands.ask(
                *(("EVAL", script, len(names), *names, *arguments(names, most_bytes)) for names in asked.values())
            )
            pauses.begin()
            for (group, names), answer in zip(asked.items(), answers, strict=True):
                if isinstance(answer, NO_ANSWER):
                    raise answer
                num_read = 0
                for name, (what, text) in zip(names, unpacked_keys(answer), strict=False):
                    yield name, what, text
                    num_read += 1
                    await pauses.rest()
                groups[group] = groups[group][max(num_read, 1) :]
                if not groups[group]:
                    del groups[group]

    def _read(self, key: WorkerKey, record: bytes, seal: bytes) -> Heartbeat | None:
        try:
            beat = decode_heartbeat(record)
        except ValueError as error:  # msgspec's own, and UnicodeDecodeError
            self._unreadable.skip(Unread.WORKER, key[1], error)
            return None
        if beat.protocol != PROTOCOL_VERSION:
            self._leave_out(key, f"it speaks protocol {beat.protocol}, this gateway {PROTOCOL_VERSION}")
            return None
        # Otherwise a valid record of one worker, copied to the key of another, would attract the calls of the other.
        if (beat.model, beat.worker) != key or not fits(seal, seal_heartbeat(self._secret, record)):
            self._refused()
            self._leave_out(
                key,
                "its record is not sealed with this gateway's worker secret, so something else wrote it",
                "give gateways and workers the same PADDOCK_WORKER_SECRET, or see who may write to Redis",
            )
            return None
        self._left_out.discard(key)
        return beat

    def _leave_out(self, key: WorkerKey, why: str, remedy: str = "update the older of the two") -> None:
        """Log that a worker is left out, once per worker: records are read again and again."""
        if key not in self._left_out and len(self._left_out) < MAX_NAMED:
            log.warning("worker %s is left out: %s; %s", key[1][:MAX_NAME_CHARS], why, remedy)
            self._left_out.add(key)

    def _texts(self, kind: Unread, values: Iterable[object]) -> Iterator[str]:
        """Yield as text the values that can be names of models or workers; count and skip the others."""
        for value in values:
            try:
                text = value.decode() if isinstance(value, bytes) else str(value)
            except UnicodeDecodeError as error:
                self._unreadable.skip(kind, value, error)
                continue
            if 0 < len(text) <= MAX_NAME_CHARS and text.isprintable():
                yield text
            else:
                self._unreadable.skip(kind, text, "it is no name")


def _shuffled(given: Iterable[Item]) -> list[Item]:
    items = list(given)
    return random.sample(items, len(items))


FIRST_MS = 5000
"""Maximum age in ms of the reports that the first reading includes. The prefix hashes in Redis are about as old."""
AT_ONCE = 2000
"""Maximum number of entries in one answer of Redis; more entries take several answers."""
MOST_BYTES = 2 << 20
"""Bytes of entries after which an answer ends: a worker under an attacker's control can write anything there."""
LONGEST_BYTES = 256 << 10
"""Maximum bytes of one entry; longer ones are left out. One that replaces all hashes of a worker has 2/3 of this."""
MOST_ANSWERS = 16
"""Maximum replies of Redis in one reading of `pd:news`, so that records are read in time; the next reading goes on."""

_NEWS_HEADER = Struct(">II")


@dataclass(frozen=True, slots=True)
class TimedNews:
    news: News
    written_at: float
    """time.monotonic() when the worker wrote the report, or a little earlier."""


class NewsReader:
    """Reads the stream of news, each time from where the last reading stopped. For use by one task at a time."""

    def __init__(
        self, redis: redis.asyncio.Redis, secret: str, refused: Callable[[], None], unreadable: Unreadable
    ) -> None:
        """`secret`: the key that seals what workers write. `refused` is called for each entry without a valid seal;
        `unreadable` counts sealed entries that can't be read."""
        self._commands = long_commands_of(redis)
        self._secret = secret
        self._refused = refused
        self._unreadable = unreadable
        self._source = load_news_script().source
        self._last = ""

    async def read(self) -> AsyncGenerator[TimedNews]:
        """Yield new entries, oldest first, from at most MOST_ANSWERS answers of Redis. Raises redis.RedisError.

        Left out are entries that the stream dropped before they were read, and entries that can't be read or have no
        valid seal: the numbers of the yielded entries then have a gap. After some ms of work, which includes the
        caller's work on an entry, the reader rests."""
        pauses = Pauses()
        for _ in range(MOST_ANSWERS):
            # EVAL sends the whole script each time: it is short, and a server that lost its scripts needs no retry.
            call = ("EVAL", self._source, 1, keys.NEWS, self._last, AT_ONCE, FIRST_MS, LONGEST_BYTES, MOST_BYTES)
            # Measured before the request: calls placed before the answer comes would count as included in the news.
            asked_at = time.monotonic()
            (answer,) = await self._commands.ask(call)
            if isinstance(answer, RedisError):
                if not is_of_one_name(answer):
                    raise answer
                # Workers' records and prefix hashes bring the same facts, only later.
                self._unreadable.skip(Unread.NEWS, keys.NEWS, answer)
                return
            last, packed, is_more = answer
            self._last = last.decode()
            pauses.begin()
            for age_ms, value in _unpacked(packed):
                news = self._open(value)
                if news is not None:
                    yield TimedNews(news, asked_at - age_ms / 1000)
                await pauses.rest()
            if not is_more:
                break

    def _open(self, value: bytes) -> News | None:
        try:
            return open_news(value, self._secret)
        except NotSealed:
            self._refused()
            return None
        except ValueError as error:  # news of another version: the worker's record shows that
            self._unreadable.skip(Unread.NEWS, value[:40], error)
            return None


def _unpacked(packed: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(packed):
        age_ms, length = _NEWS_HEADER.unpack_from(packed, at)
        at += _NEWS_HEADER.size + length
        yield age_ms, packed[at - length : at]
