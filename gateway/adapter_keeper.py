"""Sees to it that every worker of a model has the adapters that were loaded at run time, those that start later too."""

from __future__ import annotations

import asyncio
import logging
import time

from redis.exceptions import RedisError

from gateway.errors import PaddockError
from gateway.inquiries import Inquiries
from gateway.pipeline import Fleet
from gateway.registry.adapter_wishes import AdapterWishes
from gateway.store.cancellation import raise_if_cancelled
from workers.protocol.adapters import ADAPTERS_PATH, LoadAdapter, decode_info
from workers.protocol.heartbeat import Heartbeat

log = logging.getLogger(__name__)

LOOK_S = 1.0
REST_S = 30.0
"""How long a worker that could not load a file is left alone with it."""


class AdapterKeeper:
    """Runs beside the requests of a gateway. Loading what is there already changes nothing."""

    def __init__(self, fleet: Fleet, inquiries: Inquiries, wishes: AdapterWishes) -> None:
        self._fleet = fleet
        self._inquiries = inquiries
        self._wishes = wishes
        self._resting: dict[tuple[str, str], float] = {}
        """Boot id and adapter -> time.monotonic() until which nothing is tried."""

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            for model in list(self._fleet.snapshot.workers):
                await self._look_after(model)
            now = time.monotonic()
            self._resting = {what: until for what, until in self._resting.items() if until > now}
            raise_if_cancelled()
            await asyncio.sleep(LOOK_S)

    async def _look_after(self, model: str) -> None:
        # As it is now: an adapter may be taken away while another one is loaded.
        wanted = dict(self._wishes.files(model))
        for beat in self._inquiries.workers(model) if wanted else ():
            for name in wanted.keys() - set(beat.adapters) if not beat.draining else ():
                if self._resting.get((beat.boot, name), 0.0) <= time.monotonic():
                    await self._load(model, beat, wanted[name])

    async def _load(self, model: str, beat: Heartbeat, asked: LoadAdapter) -> None:
        # A heartbeat is late to tell of it, and a file that can't be loaded now can't be in a second.
        self._resting[beat.boot, asked.name] = time.monotonic() + REST_S
        try:
            if await self._wishes.wants(model, asked.name):
                await self._inquiries.of_worker(beat, "POST", ADAPTERS_PATH, decode_info, asked)
                log.info("worker %s got adapter %s", beat.worker, asked.name)
        except (PaddockError, RedisError, OSError) as error:
            log.warning("worker %s has no adapter %s: %s", beat.worker, asked.name, error)
