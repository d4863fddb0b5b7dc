"""Makes every worker of a model load the registered adapters and unload the removed ones.

This is for workers that start later, or could not be asked when an adapter was registered. If Redis has lost the
registrations, they are made again from the adapters that the workers have.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import suppress
from urllib.parse import quote

from gateway.adapters.desired import AdapterRecord, DesiredAdapters
from gateway.errors import PaddockError
from gateway.registry.snapshot import FleetView
from gateway.relay.relay import WorkerQueries
from gateway.store.outage import NO_ANSWER, Outage, raise_if_cancelled
from workers.protocol.heartbeat import Heartbeat
from workers.protocol.queries import ADAPTERS_PATH, AdapterInfo, AdapterState, decode_adapter_infos, decode_info

log = logging.getLogger(__name__)

LOOK_S = 1.0
REST_S = 30.0
"""Seconds before a request that failed at a worker (loading, removing or listing adapters) is tried there again."""
SETTLE_S = 2.0
"""Seconds before a request that succeeded may be sent to the worker again: heartbeats show the change late."""

AT_ONCE = 16
"""Maximum number of workers asked at the same time; the others wait for their turn."""

_USABLE = (AdapterState.LOADED, AdapterState.KNOWN)


class AdapterReconciler:
    """Compares workers' adapters with the registered ones, and corrects differences. It is harmless to send a worker
    the same request twice."""

    def __init__(self, fleet: FleetView, queries: WorkerQueries, desired: DesiredAdapters) -> None:
        self._fleet = fleet
        self._queries = queries
        self._desired = desired
        self._soon = asyncio.Event()
        self._resting: dict[tuple[str, str, str], float] = {}
        """(Worker's boot id, adapter, task) -> time.monotonic() before which the task is not tried again. A task is
        the SHA-256 of a file to load, "" for an adapter to remove, or "adopt" for one to register."""
        self._fixed: dict[str, frozenset[str]] = {}
        """Worker's boot id -> adapters that its settings name; no entry until the worker was asked for them."""

    def reconcile_soon(self) -> None:
        """Make `run` compare at once, because the fleet has changed."""
        self._soon.set()

    async def run(self) -> None:
        """Compare and correct every LOOK_S seconds, and at once after `reconcile_soon`, until cancelled."""
        outage = Outage("adapters can't be looked after", "workers keep those that they have", "adapters are cared for")
        while True:
            self._soon.clear()
            with outage.survive():
                await self._reconcile()
            raise_if_cancelled()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._soon.wait()

    async def _reconcile(self) -> None:
        turns = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for model in list(self._fleet.snapshot.workers):
                for beat in self._queries.workers(model):
                    if not beat.draining and self._has_work(beat):
                        group.create_task(self._reconcile_worker(beat, turns))
        self._forget_the_gone()

    def _has_work(self, beat: Heartbeat) -> bool:
        return bool(self._lacking(beat) or self._unwanted(beat) or self._unknown(beat))

    def _lacking(self, beat: Heartbeat) -> list[AdapterRecord]:
        records = self._desired.records(beat.model).values()
        return [
            record
            for record in records
            if beat.adapter_hashes.get(record.name) != record.sha256
            and not self._is_resting(beat, record.name, record.sha256)
        ]

    def _unwanted(self, beat: Heartbeat) -> list[str]:
        names = self._desired.removed(beat.model).intersection(beat.adapters)
        return [name for name in names if name not in self._fixed_of(beat) and not self._is_resting(beat, name, "")]

    def _unknown(self, beat: Heartbeat) -> set[str]:
        """Return the worker's adapters that are not registered, not removed, and not known to be from its settings."""
        known = self._desired.records(beat.model).keys() | self._desired.removed(beat.model) | self._fixed_of(beat)
        return {name for name in beat.adapters if name not in known and not self._is_resting(beat, name, "adopt")}

    async def _reconcile_worker(self, beat: Heartbeat, turns: asyncio.Semaphore) -> None:
        async with turns:
            # The lists are made anew here: an adapter may be removed while another one is loaded.
            for record in self._lacking(beat):
                await self._try(beat, self._register(beat, record), f"does not take adapter {record.name}")
            for name in self._unwanted(beat):
                await self._try(beat, self._remove(beat, name), f"keeps adapter {name}")
            if self._unknown(beat):
                await self._try(beat, self._adopt(beat), "does not tell what its adapters are")

    async def _try(self, beat: Heartbeat, act: Coroutine[None, None, None], complaint: str) -> None:
        try:
            await act
        except (PaddockError, *NO_ANSWER) as error:
            log.warning("worker %s %s: %s", beat.worker, complaint, error)

    async def _register(self, beat: Heartbeat, record: AdapterRecord) -> None:
        # A file that can't be loaded now can't be in a second.
        self._rest(beat, record.name, record.sha256, REST_S)
        if await self._desired.is_registered(record):
            await self._queries.ask_worker(beat, "POST", ADAPTERS_PATH, decode_info, record.ask())
            self._rest(beat, record.name, record.sha256, SETTLE_S)
            log.info("worker %s got adapter %s", beat.worker, record.name)

    async def _remove(self, beat: Heartbeat, name: str) -> None:
        self._rest(beat, name, "", REST_S)
        if await self._desired.is_removed(beat.model, name):
            await self._queries.ask_worker(beat, "DELETE", f"{ADAPTERS_PATH}/{quote(name)}", decode_info)
            self._rest(beat, name, "", SETTLE_S)
            log.info("worker %s gave up adapter %s", beat.worker, name)

    async def _adopt(self, beat: Heartbeat) -> None:
        unknown = self._unknown(beat)
        for name in unknown:
            self._rest(beat, name, "adopt", REST_S)
        infos = await self._queries.ask_worker(beat, "GET", ADAPTERS_PATH, decode_adapter_infos)
        self._fixed[beat.boot] = frozenset(info.name for info in infos if info.fixed)
        mine = [info for info in infos if info.name in unknown and info.state in _USABLE]
        for info in mine:
            if info.path and not info.fixed and await self._desired.adopt(_record(beat.model, info)):
                log.warning("adapter %s was registered nowhere, and is again as %s has it", info.name, beat.worker)

    def _fixed_of(self, beat: Heartbeat) -> frozenset[str]:
        return self._fixed.get(beat.boot, frozenset())

    def _is_resting(self, beat: Heartbeat, name: str, what: str) -> bool:
        return self._resting.get((beat.boot, name, what), 0.0) > time.monotonic()

    def _rest(self, beat: Heartbeat, name: str, what: str, seconds: float) -> None:
        self._resting[beat.boot, name, what] = time.monotonic() + seconds

    def _forget_the_gone(self) -> None:
        now = time.monotonic()
        self._resting = {what: until for what, until in self._resting.items() if until > now}
        boots = {beat.boot for beats in self._fleet.snapshot.workers.values() for beat in beats}
        self._fixed = {boot: names for boot, names in self._fixed.items() if boot in boots}


def _record(model: str, info: AdapterInfo) -> AdapterRecord:
    return AdapterRecord(name=info.name, base=model, path=info.path, sha256=info.sha256, pinned=info.pinned)
