"""Reads the valid keys from Redis every few seconds, so that all gateways accept the same keys."""

from __future__ import annotations

from dataclasses import dataclass

import redis.asyncio
from redis.exceptions import RedisError, ResponseError

from accounts.protocol.records import FIRST_KEY_NAME, AccessRecord, open_record, seal_record
from gateway.access.keys import Keys
from gateway.store.outage import Outage, Unreadable, raise_if_cancelled
from gateway.store.packed import OF_ANOTHER_TYPE, Pauses, unpacked_keys, unpacked_texts
from gateway.store.scripts import load_members_script
from gateway.telemetry.metrics import Unread
from workers.process.ticks import wait_tick
from workers.protocol import keys
from workers.redis.link import long_commands_of

REREAD_S = 3.0
LONGEST_BYTES = 1 << 20
"""Maximum bytes of a key's record. Of a longer one only the beginning is read, which does not make a valid key."""
AT_ONCE = 64
"""Number of records to handle before checking whether the event loop needs a turn."""
NO_BOUND = 1 << 40
"""Value that stands for no limit on the records and bytes that one call reads: no caller can write records."""


@dataclass(frozen=True, slots=True)
class _Opened:
    value: bytes
    record: AccessRecord | None
    error: str | None
    """Why the value is not a valid key; None: it is valid."""


class KeyStore:
    """Reads the valid keys: the records of the settings, and those in Redis that are sealed with the gateway secret.
    If a name is in both, the settings' record is valid. While Redis is away, the last records stay valid.

    If Redis has lost its data, a gateway writes the first key (the record named `first`) as it last knew it. Other
    keys that were only in Redis are lost."""

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
        sealed with `secret`; their keys are not valid."""
        self._unreadable = unreadable or Unreadable()
        self._redis = redis
        self._commands = long_commands_of(redis)
        self._secret = secret
        self._target = target
        self._fixed = {record.name: record for record in fixed}
        self._first = first
        self._source = load_members_script().source
        self._opened: dict[bytes, _Opened] | None = None
        """Name -> the value last read from Redis, with the record in it. An unchanged value is not decoded again."""
        self._found: dict[str, AccessRecord] = {}

    async def refresh(self) -> None:
        """Read the keys in Redis once; if some have changed, replace the valid keys. Raises redis.RedisError if Redis
        is away."""
        opened, has_changed = dict[bytes, _Opened](), self._opened is None
        before, pauses = self._opened or {}, Pauses()
        texts = unpacked_texts(await self._read(pauses))
        next(texts)  # the cursor to go on from: not needed, as one call reads all
        for number, (name, value) in enumerate(zip(texts, texts, strict=True)):
            known = before.get(name)
            if known is None or known.value != value:
                known, has_changed = self._open(value), True
            opened[name] = known
            if known.error is not None:
                self._unreadable.skip(Unread.KEYS, name, known.error)
            if number % AT_ONCE == 0:
                await pauses.rest()
        if has_changed or len(opened) != len(before):
            self._found = {one.record.name: one.record for one in opened.values() if one.record is not None}
            self._first = self._found.get(FIRST_KEY_NAME, self._first)
            self._target.replace(({FIRST_KEY_NAME: self._first} | self._found | self._fixed).values())
        self._opened = opened
        if FIRST_KEY_NAME not in self._found:
            await self._redis.hsetnx(keys.ACCESS_KEYS, FIRST_KEY_NAME, seal_record(self._first, self._secret))

    async def _read(self, pauses: Pauses) -> bytes:
        """Return all names and records in Redis, packed into bytes (lua/members.lua). One call reads them all: a scan
        in several calls could miss some if a failover changed the server in between."""
        call = ("EVAL", self._source, 1, keys.ACCESS_KEYS, "hash", LONGEST_BYTES, NO_BOUND, NO_BOUND, "0")
        (answer,) = await self._commands.ask(call)
        pauses.begin()
        if isinstance(answer, RedisError):
            raise answer
        ((what, packed),) = unpacked_keys(answer)
        if what == OF_ANOTHER_TYPE:
            raise ResponseError(packed.decode())
        return packed

    def _open(self, value: bytes) -> _Opened:
        try:
            return _Opened(value, open_record(value, self._secret), None)
        except ValueError as error:
            return _Opened(value, None, str(error))

    async def run(self) -> None:
        """Refresh the keys every REREAD_S seconds until cancelled."""
        outage = Outage("the API keys can't be read", "keeping the last ones", "the API keys can be read again")
        while True:
            with outage.survive():
                await self.refresh()
            raise_if_cancelled()
            await wait_tick(REREAD_S)
