"""Keeps the valid keys in step with Redis, so that several gateways agree within seconds."""

from __future__ import annotations

import asyncio

import redis.asyncio

from gateway.access.keys import Keys
from gateway.access.records import FIRST_KEY_NAME, AccessRecord
from gateway.access.sealed_records import open_record, seal_record
from gateway.store.cancellation import raise_if_cancelled
from gateway.store.outage import Outage
from gateway.store.unreadable import Unreadable
from workers.protocol import keys
from workers.protocol.metrics.of_gateway import Unread

REREAD_S = 3.0


class KeyStore:
    """Reads the valid keys: the records of the settings, and those in Redis that a holder of the gateway secret wrote.
    Where both have a name, the settings' record counts. While Redis is away the last records stay valid.

    A Redis that comes back empty gets the first key again from any gateway that has seen it; keys that stood only in
    Redis are lost with it.
    """

    def __init__(
        self,
        redis: redis.asyncio.Redis,
        secret: str,
        target: Keys,
        fixed: tuple[AccessRecord, ...],
        first: AccessRecord,
        unreadable: Unreadable | None = None,
    ) -> None:
        """`unreadable` hears of records that can't be read or are not sealed with `secret`; they are no keys."""
        self._unreadable = unreadable or Unreadable()
        self._redis = redis
        self._secret = secret
        self._target = target
        self._fixed = {record.name: record for record in fixed}
        self._first = first

    async def refresh(self) -> None:
        """Read the keys in Redis once and replace the valid ones. Raises redis.RedisError when Redis is away."""
        found: dict[str, AccessRecord] = {}
        for name, value in (await self._redis.hgetall(keys.ACCESS_KEYS)).items():
            try:
                record = open_record(value, self._secret)
            except ValueError as error:
                self._unreadable.skip(Unread.KEYS, name, error)
                continue
            found[record.name] = record
        if FIRST_KEY_NAME in found:
            self._first = found[FIRST_KEY_NAME]
        else:
            await self._redis.hsetnx(keys.ACCESS_KEYS, FIRST_KEY_NAME, seal_record(self._first, self._secret))
        self._target.replace(({FIRST_KEY_NAME: self._first} | found | self._fixed).values())

    async def run(self) -> None:
        """Refresh the keys every REREAD_S seconds until cancelled."""
        outage = Outage("the API keys can't be read", "keeping the last ones", "the API keys can be read again")
        while True:
            with outage.outlived():
                await self.refresh()
            raise_if_cancelled()
            await asyncio.sleep(REREAD_S)
