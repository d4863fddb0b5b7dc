"""Reads what becomes of the downloads of all machines, and orders downloads and removals, through Redis."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass

import redis.asyncio

from gateway.errors import StoreUnavailable
from gateway.store.outage import Unreadable, answered
from gateway.store.packed import Pauses, read_hash
from gateway.telemetry.metrics import Unread
from workers.protocol import keys, residency
from workers.protocol.residency import (
    Action,
    Download,
    LibraryAnswer,
    LibraryOrder,
    MachineLibrary,
    decode_library,
    encode,
)
from workers.redis.link import long_commands_of

ANSWER_S = 10.0
"""Seconds in which a machine has to answer an order."""
LOOK_S = 0.1
ORDERS_TTL_S = 60.0
"""Lifetime of orders that nobody reads."""
LONGEST_BYTES = 1 << 20
"""Maximum bytes of what one machine tells; more is left out."""


@dataclass(frozen=True, slots=True)
class _Told:
    told: MachineLibrary
    read_at: float
    """time.monotonic() when it was first read: clocks of machines differ."""


class Libraries:
    """The models folders of the machines whose supervisors take orders."""

    def __init__(self, redis: redis.asyncio.Redis, unreadable: Unreadable | None = None) -> None:
        """`unreadable` counts what can't be read."""
        self._redis = redis
        self._commands = long_commands_of(redis)
        self._unreadable = unreadable or Unreadable()
        self._known: dict[str, _Told] = {}

    async def machines(self) -> Mapping[str, MachineLibrary]:
        """Return machine -> what it tells. Raises StoreUnavailable."""
        found: dict[str, _Told] = {}
        reading = read_hash(self._commands, keys.LIBRARY, Unread.LIBRARY, self._unreadable, LONGEST_BYTES)
        fields = await answered(reading)
        now, pauses = time.monotonic(), Pauses()
        for name, value in fields.items():
            await pauses.rest()
            try:
                machine, told = name.decode(), decode_library(value)
            except ValueError as error:
                self._unreadable.skip(Unread.LIBRARY, name, error)
                continue
            known = self._known.get(machine)
            is_same = known is not None and known.told.at == told.at
            found[machine] = known if known is not None and is_same else _Told(told, now)
        self._known = found
        return {
            machine: one.told for machine, one in sorted(found.items()) if now - one.read_at < residency.LIBRARY_LIFE_S
        }

    async def downloads(self) -> dict[str, Download]:
        """Return reference -> its download, that which began last where several machines have one; none while Redis
        does not answer."""
        try:
            machines = await self.machines()
        except StoreUnavailable:
            return {}
        every = [each for told in machines.values() for each in told.downloads.items()]
        return dict(sorted(every, key=lambda item: item[1].since))

    async def order(self, machine: str, action: Action, model: str) -> LibraryAnswer | None:
        """Have a machine do something, and return its answer; None: it gave none. Raises StoreUnavailable."""
        order_id = secrets.token_hex(8)
        order = LibraryOrder(machine=machine, action=action, model=model, at=time.time())
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.hset(keys.LIBRARY_ORDERS, order_id, encode(order))
            pipeline.pexpire(keys.LIBRARY_ORDERS, round(1000 * ORDERS_TTL_S))
            await answered(pipeline.execute())
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S)
            told = (await self.machines()).get(machine)
            if told is not None and (answer := told.answers.get(order_id)) is not None:
                return answer
        await answered(self._redis.hdel(keys.LIBRARY_ORDERS, order_id))
        return None
