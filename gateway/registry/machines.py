"""Reads what the supervisors of machines tell of their memory and workers (`workers.planner.messages`). Nothing is read
while nobody looks, and seldom otherwise: it is for people."""

from __future__ import annotations

import time
from collections.abc import Mapping

import redis.asyncio

from gateway.store.outage import Unreadable, answered
from gateway.store.packed import read_hash
from gateway.telemetry.metrics import Unread
from workers.planner.hearing import Hearing
from workers.planner.merge import MachineView, worker_of
from workers.planner.messages import MachineCatalog, decode_catalog, decode_report
from workers.protocol import keys
from workers.redis.link import long_commands_of

EVERY_S = 2.0
"""Minimum seconds between two readings."""
LONGEST_BYTES = 1 << 20
"""Maximum bytes of what one machine tells; longer messages are left out."""


class Machines:
    """The machines whose supervisors load models on demand, as they were told last."""

    def __init__(self, redis: redis.asyncio.Redis, unreadable: Unreadable) -> None:
        """`unreadable` counts what can't be read."""
        self._commands = long_commands_of(redis)
        self._unreadable = unreadable
        self._reports = Hearing(decode_report)
        self._catalogs: dict[str, tuple[str, MachineCatalog | None]] = {}
        """Machine -> the digest that it told with its catalog, and the catalog; None: it can't be read."""
        self._views: Mapping[str, MachineView] = {}
        self._read_at = float("-inf")

    async def look(self) -> Mapping[str, MachineView]:
        """Return the machines that are alive, by name, as they were at most EVERY_S ago. Raises StoreUnavailable."""
        clock = time.monotonic()
        if clock - self._read_at >= EVERY_S:
            self._reports.take(await self._read(keys.MACHINES, Unread.MACHINES), time.time(), clock)
            await self._read_catalogs(clock)
            self._views, self._read_at = self._seen(clock), clock
        return self._views

    async def _read_catalogs(self, clock: float) -> None:
        """Read the catalogs that have changed."""
        live = {name: heard.told.catalog for name, heard in self._reports.live(clock).items()}
        self._catalogs = {name: known for name, known in self._catalogs.items() if name in live}
        wanted = [name for name, digest in live.items() if self._catalogs.get(name, ("", None))[0] != digest]
        if not wanted:
            return
        found = await self._read(keys.MACHINE_MODELS, Unread.MACHINE_MODELS)
        for name in wanted:
            self._catalogs[name] = (live[name], self._catalog_of(name, found.get(name.encode())))

    async def _read(self, name: str, kind: Unread) -> Mapping[bytes, bytes]:
        return await answered(read_hash(self._commands, name, kind, self._unreadable, LONGEST_BYTES))

    def _catalog_of(self, machine: str, value: bytes | None) -> MachineCatalog | None:
        if value is None:
            return None
        try:
            return decode_catalog(value)
        except ValueError as error:  # msgspec's own
            self._unreadable.skip(Unread.MACHINE_MODELS, machine, error)
            return None

    def _seen(self, clock: float) -> dict[str, MachineView]:
        return {
            name: MachineView(
                heard.told,
                heard.lag_s,
                tuple(worker_of(told, name, heard.lag_s) for told in heard.told.workers),
                self._catalogs.get(name, ("", None))[1],
            )
            for name, heard in sorted(self._reports.live(clock).items())
        }
