"""Keeps the valid keys, and all that a key's rights depend on, as Redis and the settings have them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import redis.asyncio

from accounts.protocol import changes
from accounts.protocol.records import (
    FIRST_KEY_NAME,
    AccessRecord,
    SubjectRecord,
    open_record,
    open_subject,
    opened_record,
    subject_field,
)
from gateway.access.directory import Directory
from gateway.access.keys import Keys
from gateway.access.record_reader import POLL_S, RecordReader
from gateway.store.outage import Outage, Unreadable, raise_if_cancelled
from gateway.telemetry.metrics import Unread
from workers.process.ticks import wait_tick
from workers.redis.link import run_command

FIRST = FIRST_KEY_NAME.encode()


class KeyCopy:
    """The keys in Redis. Names that the settings have are left out."""

    def __init__(self, target: Keys, secret: str, own_names: Collection[str], unreadable: Unreadable) -> None:
        self._target = target
        self._index = target.index
        self._secret = secret
        self._own_names = own_names
        self._unreadable = unreadable

    def __len__(self) -> int:
        return len(self._index)

    def names(self) -> Iterator[list[bytes]]:
        return self._index.names()

    def put(self, name: bytes, value: bytes) -> None:
        if self._index.value(name) == value and self._index.is_valid(name):
            return
        record: AccessRecord | None = None
        try:
            record = open_record(value, self._secret)
            if record.name.encode() != name:
                raise ValueError(f"it is the record of the key {record.name!r}")
        except ValueError as error:
            record = None
            self._unreadable.skip(Unread.KEYS, name, error)
        else:
            if record.name in self._own_names:
                record = None
        self._target.put(name, value, record)

    def remove(self, name: bytes) -> None:
        self._target.remove(name)


class SubjectCopy:
    """The subjects in Redis. One whose new record can't be read keeps the last one: without it there were no limits."""

    def __init__(self, target: Directory, secret: str, unreadable: Unreadable) -> None:
        self._target = target
        self._secret = secret
        self._unreadable = unreadable
        self._values: dict[bytes, bytes] = {}
        """Field -> what Redis has there."""
        self._records: dict[bytes, SubjectRecord] = {}
        """Field -> the last record in it that was valid."""

    def __len__(self) -> int:
        return len(self._values)

    def names(self) -> Iterator[list[bytes]]:
        yield list(self._values)

    def put(self, name: bytes, value: bytes) -> None:
        if self._values.get(name) == value and name in self._records:
            return
        self._values[name] = value
        try:
            record = open_subject(value, self._secret)
            if subject_field(record).encode() != name:
                raise ValueError(f"it is the record of {subject_field(record)!r}")
        except ValueError as error:
            self._unreadable.skip(Unread.SUBJECTS, name, error)
            return
        self._records[name] = record
        self._target.put(record)

    def remove(self, name: bytes) -> None:
        self._values.pop(name, None)
        record = self._records.pop(name, None)
        if record is not None:
            self._target.remove(record)


class KeyStore:
    """Keeps `Keys` and their `Directory` as Redis has them: records that are sealed with the gateway secret. A name in
    the settings beats the same in Redis. While Redis is away, the last records stay valid.

    If Redis has lost its data, a gateway writes the first key (the record named `first`) as it last knew it. Other
    keys that were only in Redis are lost there, unless the accounts service has them."""

    def __init__(
        self,
        redis: redis.asyncio.Redis,
        secret: str,
        target: Keys,
        fixed: tuple[AccessRecord, ...],
        first: AccessRecord,
        unreadable: Unreadable | None = None,
    ) -> None:
        """`fixed`: the records of the settings. `unreadable` counts records in Redis that can't be read or are not
        sealed with `secret`: such keys are not valid."""
        unreadable = unreadable or Unreadable()
        own_names = frozenset(record.name for record in fixed)
        self._redis = redis
        self._secret = secret
        self._target = target
        self._fixed = fixed
        self._first = first
        self._stands_in = False
        """Whether the first key is valid though Redis has no valid record of it."""
        of_keys = KeyCopy(target, secret, own_names, unreadable)
        self._reader = RecordReader(redis, of_keys, SubjectCopy(target.directory, secret, unreadable))
        target.replace(fixed)

    async def refresh(self) -> None:
        """Take what has changed in Redis. Raises redis.RedisError or OSError if Redis is away."""
        try:
            await self._reader.read()
        finally:
            self._keep_first()
        if self._target.index.value(FIRST) is None:
            await run_command(self._redis, changes.command([changes.offer(self._first, self._secret)]))

    def _keep_first(self) -> None:
        index = self._target.index
        is_there = index.is_valid(FIRST)
        if is_there and (value := index.value(FIRST)) is not None:
            self._first = opened_record(value)
        if self._stands_in == is_there:
            self._stands_in = not is_there
            self._target.replace((self._first, *self._fixed) if self._stands_in else self._fixed)

    async def run(self) -> None:
        """Refresh the keys every POLL_S seconds until cancelled."""
        outage = Outage("the API keys can't be read", "keeping the last ones", "the API keys can be read again")
        while True:
            with outage.survive():
                await self.refresh()
            raise_if_cancelled()
            await wait_tick(POLL_S)
