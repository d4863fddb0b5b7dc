"""The ledger's end of the stream of usage: takes entries as one of a group, and tells gateways what is committed.

An entry stays in the stream, as its reader's, until it is committed; what a reader that died has taken goes to another.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from redis.exceptions import ResponseError

from accounts.protocol.usage import BATCH_FIELD, NAME_FIELD
from workers.protocol import keys

CLAIM_AFTER_S = 10.0
"""Seconds after which an entry that a reader has taken and not committed goes to another one: the reader is dead, or
its database away. If it is neither, the records are written twice, and count once."""
CLAIM_EVERY_S = 3.0
FORGET_S = 86_400.0
"""Seconds for which a gateway can learn that a batch was committed. After that it sends the batch again, which changes
nothing."""
FORGET_EVERY_S = 3600.0
IDLE_READER_S = 3600.0
"""Seconds without a word after which a reader that holds no entries is removed from the group."""
MAX_SET_ASIDE = 1000
"""About how many unusable entries are kept for whoever looks into them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the stream."""

    id: bytes
    name: bytes
    """Name of the batch; empty: the entry has none."""
    batch: bytes


class LedgerStream:
    """One reader of the stream. Methods raise RedisError and OSError."""

    def __init__(self, redis: redis.asyncio.Redis) -> None:
        self._redis = redis
        self._name = f"accounts-{secrets.token_hex(6)}"
        self._claim_at = self._forget_at = 0.0

    async def take(self, max_entries: int, wait_s: float) -> list[Entry]:
        """Return entries that no other reader has; wait up to `wait_s` for some."""
        entries: list[Entry] = []
        try:
            if time.monotonic() >= self._claim_at:
                self._claim_at = time.monotonic() + CLAIM_EVERY_S
                entries = await self._claim(max_entries)
            if len(entries) < max_entries:
                block_ms = None if entries else max(1, round(wait_s * 1000))
                found = await self._redis.xreadgroup(
                    keys.USAGE_GROUP, self._name, {keys.USAGE: ">"}, max_entries - len(entries), block_ms
                )
                entries += _entries(_of_stream(found))
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            await self._make_group()
        return entries

    async def commit(self, entries: Sequence[Entry]) -> None:
        """Take committed entries out of the stream, and tell their gateways."""
        if not entries:
            return
        ids = [entry.id for entry in entries]
        names: dict[Any, Any] = {entry.name: f"{time.time():.0f}" for entry in entries if entry.name}
        # With the same transaction: a gateway that finds neither sends the batch again.
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.xack(keys.USAGE, keys.USAGE_GROUP, *ids)
            pipe.xdel(keys.USAGE, *ids)
            if names:
                pipe.hset(keys.USAGE_BATCHES, mapping=names)
            await pipe.execute()

    async def set_aside(self, entry: Entry, why: str) -> None:
        """Keep an entry that can't be written for whoever looks into it. It still has to be committed."""
        fields: dict[Any, Any] = {NAME_FIELD: entry.name, BATCH_FIELD: entry.batch, b"why": why[:500].encode()}
        await self._redis.xadd(keys.USAGE_SET_ASIDE, fields, maxlen=MAX_SET_ASIDE, approximate=True)

    async def tidy(self) -> None:
        """Remove, now and then, what nobody needs any more: old notes of commits, and dead readers."""
        if time.monotonic() < self._forget_at:
            return
        self._forget_at = time.monotonic() + FORGET_EVERY_S
        await self._forget_old()
        for reader in await self._redis.xinfo_consumers(keys.USAGE, keys.USAGE_GROUP):
            if reader["pending"] == 0 and reader["idle"] > IDLE_READER_S * 1000:
                await self._redis.xgroup_delconsumer(keys.USAGE, keys.USAGE_GROUP, reader["name"])

    async def _claim(self, max_entries: int) -> list[Entry]:
        """Take over entries of readers that are dead or stuck."""
        answer = await self._redis.xautoclaim(
            keys.USAGE, keys.USAGE_GROUP, self._name, round(CLAIM_AFTER_S * 1000), count=max_entries
        )
        return _entries(answer[1])

    async def _make_group(self) -> None:
        """Make the group, which reads from the stream's begin: the stream is new, or Redis has lost the group."""
        try:
            await self._redis.xgroup_create(keys.USAGE, keys.USAGE_GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    async def _forget_old(self) -> None:
        old: list[bytes] = []
        async for name, told in self._redis.hscan_iter(keys.USAGE_BATCHES, count=500):
            if told.isdigit() and time.time() - int(told) > FORGET_S:
                old.append(name)
        for start in range(0, len(old), 500):
            await self._redis.hdel(keys.USAGE_BATCHES, *old[start : start + 500])


def _of_stream(answer: Any) -> list[Any]:
    """Return the entries in the reply of XREADGROUP, whose form depends on the protocol."""
    if not answer:
        return []
    found = answer[keys.USAGE.encode()] if isinstance(answer, dict) else answer[0][1]
    if found and isinstance(found[0], list):
        return [entry for part in found for entry in part]
    return list(found)


def _entries(found: Sequence[Any]) -> list[Entry]:
    """Return entries; one that was deleted meanwhile has no fields, and is left out."""
    return [Entry(id, fields.get(NAME_FIELD, b""), fields.get(BATCH_FIELD, b"")) for id, fields in found if fields]
