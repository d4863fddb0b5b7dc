"""Reads what becomes of the downloads of all machines, and orders downloads and removals, through Redis."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Collection, Mapping
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
GONE_S = 4 * residency.LIBRARY_LIFE_S
"""Seconds after which a machine that tells nothing new is forgotten."""
LONGEST_BYTES = 1 << 20
"""Maximum bytes of what one machine tells; more is left out."""


Downloads = Mapping[tuple[str, str], Download]
"""(Machine, reference) -> its download."""


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
        gone = [machine for machine, one in found.items() if now - one.read_at > GONE_S]
        if gone:  # others keep the hash alive, and to a gateway that starts it would seem to be there
            await answered(self._redis.hdel(keys.LIBRARY, *gone))
        self._known = {machine: one for machine, one in found.items() if machine not in gone}
        return {
            machine: one.told
            for machine, one in sorted(self._known.items())
            if now - one.read_at < residency.LIBRARY_LIFE_S
        }

    async def downloads(self) -> Downloads | None:
        """Return the downloads of all machines; None while Redis does not answer."""
        try:
            machines = await self.machines()
        except StoreUnavailable:
            return None
        return {(machine, model): one for machine, told in machines.items() for model, one in told.downloads.items()}

    async def order(self, machines: Collection[str], action: Action, model: str) -> dict[str, LibraryAnswer | None]:
        """Have machines do something, and return the answer of each; None: it gave none. Raises StoreUnavailable."""
        orders = {machine: secrets.token_hex(8) for machine in machines}
        async with self._redis.pipeline(transaction=False) as pipeline:
            for machine, order_id in orders.items():
                order = LibraryOrder(machine=machine, action=action, model=model, at=time.time())
                pipeline.hset(keys.LIBRARY_ORDERS, order_id, encode(order))
            pipeline.pexpire(keys.LIBRARY_ORDERS, round(1000 * ORDERS_TTL_S))
            await answered(pipeline.execute())
        answers: dict[str, LibraryAnswer | None] = dict.fromkeys(orders)
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S)
            for machine, told in (await self.machines()).items():
                if machine in orders and (answer := told.answers.get(orders[machine])) is not None:
                    answers[machine] = answer
            if all(answers.values()):
                return answers
        silent = [orders[machine] for machine, answer in answers.items() if answer is None]
        await answered(self._redis.hdel(keys.LIBRARY_ORDERS, *silent))
        return answers
