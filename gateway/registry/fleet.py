"""Follows the workers in Redis: reads all records every few seconds, news of load and cache several times a second."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing

import redis.asyncio

from gateway.adapters.names import Contents
from gateway.registry.fleet_state import FleetState
from gateway.registry.heard_workers import HeardWorkers
from gateway.registry.records import MOST_STRANGE_BYTES, NewsReader, RecordReader, WorkerKey
from gateway.registry.snapshot import FleetSnapshot
from gateway.routing.pool import Pool
from gateway.store.outage import Outage, Unreadable, raise_if_cancelled
from gateway.store.packed import Pauses
from workers.process.ticks import wait_tick
from workers.protocol import keys
from workers.protocol.heartbeat import Heartbeat
from workers.redis.channel import follow

__all__ = ["Fleet", "FleetSnapshot"]

log = logging.getLogger(__name__)

RECORD_S = 0.003
"""Minimum seconds between two readings of all records, per worker of the fleet: readings then take 1 % of a core."""
WORK_REST = 10
"""Minimum time between two readings of all records, as a multiple of what one takes: at most 10 % of a core is used."""
URGENT_SHARE = 0.1
"""Share of the minimum pause (RECORD_S, WORK_REST) kept before an early reading, for which any worker can ask."""
MAX_ANNOUNCED = 1024
"""Maximum number of workers whose new records are read singly; if more workers announce some, all records are read."""
RESYNCED_AT_ONCE = 16
"""Maximum number of workers whose prefix hashes are read between two readings of news; others follow later. Each worker
has a few thousand hashes; reading those of 16 workers takes some ms."""
PATIENCE_S = 2 * keys.HEARTBEAT_INTERVAL_S
"""Seconds to keep the last records after Redis lost data or refused writes, so that live workers can write new ones."""
BEFORE_S = 0.02
"""A call placed less than this many seconds before a worker's report is taken as not yet counted in that report."""


def _always(model: str) -> bool:
    """Return True for any model. It is the default for `takes_writes`, until `keep_unless` sets another function."""
    return True


class Fleet:
    """Follows the fleet in Redis. Keeps the last known fleet while Redis is away or refuses what workers write, and
    workers that can't write although this gateway hears them (`HeardWorkers`).

    Loads and prefix hashes are at most twice `keys.NEWS_INTERVAL_S` old. All records, and so the list of workers, are
    read every `interval_s`, in a large fleet less often (RECORD_S). A record that its worker announces is read at once.
    """

    def __init__(
        self,
        redis: redis.asyncio.Redis,
        secret: str,
        on_change: Callable[[FleetSnapshot], None] | None = None,
        *,
        interval_s: float = keys.HEARTBEAT_INTERVAL_S,
        registered: Callable[[], Mapping[str, Contents]] = dict,
        refused: Callable[[str], None] = lambda kind: None,
        unreadable: Unreadable | None = None,
    ) -> None:
        """`secret` seals what workers write. `registered` returns model -> its registered adapters -> SHA-256 of the
        file. `refused` is called with `record` or `news` for each record or entry of `pd:news` without a valid seal;
        `unreadable` counts those that can't be read."""
        unreadable = unreadable or Unreadable()
        self._redis = redis
        self._records = RecordReader(redis, secret, lambda: refused("record"), unreadable)
        self._news = NewsReader(redis, secret, lambda: refused("news"), unreadable)
        self._heard = HeardWorkers(redis, secret)
        self._state = FleetState(registered)
        self._listeners = [on_change] if on_change else []
        self._membership = FleetSnapshot().membership()
        self._takes_writes: Callable[[str], bool] = _always
        self._kept_until: dict[str, float] = {}
        """Model -> time.monotonic() until which its last records are kept, as its workers could not write."""
        self._interval_s = interval_s
        self._read_at = 0.0
        """time.monotonic() when all records were last read."""
        self._worked_s = 0.0
        """Seconds of work that the last reading of all records took."""
        self._forgot_at: float | None = None
        """time.monotonic() when Redis was found to have lost its data; None again PATIENCE_S later."""
        self._read_all = True
        """Whether all records should be read soon."""
        self._announced: set[WorkerKey] = set()
        """Workers that have announced new records."""
        self._wake = asyncio.Event()
        self._reading = asyncio.Lock()
        self._outage = Outage("the fleet can't be read", "keeping the last one", "the fleet can be read again")

    @property
    def snapshot(self) -> FleetSnapshot:
        """The fleet as of now; a new object after each change."""
        return self._state.snapshot

    def pool(self, model: str) -> Pool:
        """Return the model's workers as `gateway.routing.rank` reads them."""
        return self._state.pool(model)

    def listen(self, on_change: Callable[[FleetSnapshot], None]) -> None:
        """Have `on_change` called when a worker joins, leaves, restarts, starts or stops draining, or is resized."""
        self._listeners.append(on_change)

    def limit(self, catalog: frozenset[str] | None, withdrawn: frozenset[str]) -> None:
        """Treat models as unknown: those `withdrawn` (they have left the catalog) while none of their workers takes
        calls, and those that it does not name once they have had no worker for minutes, since Redis forgets no name.
        `catalog`: its models; None: there is none, and all that Redis names are known."""
        self._state.limit(catalog, withdrawn)
        self._notify()

    def keep_unless(self, takes_writes: Callable[[str], bool]) -> None:
        """Have a model's last records kept while `takes_writes(model)` is False: Redis refuses its workers' writes."""
        self._takes_writes = takes_writes

    def uphold(self, hears: Callable[[str], bool]) -> None:
        """Keep the workers that can't renew their records while `hears(boot)` is True: an event stream to that very
        process is open."""
        self._heard.hears = hears

    async def refresh(self) -> FleetSnapshot:
        """Read everything now. Raises redis.RedisError if Redis is away; the snapshot then stays as it was."""
        async with self._reading:
            await self._read_news()
            await self._read_records()
            workers = self._state.out_of_sync
            for first in range(0, len(workers), RESYNCED_AT_ONCE):
                await self._resync(workers[first : first + RESYNCED_AT_ONCE])
        return self.snapshot

    async def run(self) -> None:
        """Keep the snapshot fresh until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow(self._redis, keys.FLEET_CHANNEL, self._note_announcement, self._read_all_soon))
            tasks.create_task(self._poll())
            tasks.create_task(self._heard.run())

    def _note_announcement(self, message: bytes) -> None:
        key = _worker_key(message.decode(errors="replace"))
        if key is None or len(self._announced) >= MAX_ANNOUNCED:
            self._read_all_soon()
        else:
            self._announced.add(key)
            self._wake.set()

    def _read_all_soon(self) -> None:
        """Have all records read soon: announcements may have been missed."""
        self._read_all = True
        self._wake.set()

    async def _poll(self) -> None:
        while True:
            self._wake.clear()
            with self._outage.survive():
                async with self._reading:
                    await self._read_what_is_due()
            self._read_all = self._read_all or self._outage.lasts
            raise_if_cancelled()
            await wait_tick(min(keys.NEWS_INTERVAL_S, self._interval_s), self._wake)

    async def _read_what_is_due(self) -> None:
        await self._read_news()
        since_s = time.monotonic() - self._read_at
        rest_s = max(RECORD_S * self._state.num_workers, WORK_REST * self._worked_s)
        if since_s >= (URGENT_SHARE * rest_s if self._read_all else max(self._interval_s, rest_s)):
            await self._read_records()
        elif self._announced:
            await self._read_announced()
        await self._resync(self._state.out_of_sync[:RESYNCED_AT_ONCE])

    async def _read_news(self) -> None:
        serving_changed = False
        try:
            async with aclosing(self._news.read()) as news:
                async for one in news:
                    serving_changed |= self._state.apply_news(one.news, one.written_at - BEFORE_S)
        finally:
            if serving_changed:
                self._notify()

    async def _read_records(self) -> None:
        begun = time.monotonic()
        self._read_all = False
        announced, self._announced = self._announced, set()
        models, are_all = await self._list_models()
        if self._has_forgotten(models, begun):
            return
        pauses = Pauses()
        found, unread = await self._records.all(models, self._state.records, pauses)
        if (self._state.served & models) - unread - {model for model, _ in found}:
            # All workers of a model are gone, or Redis lost its data after it had listed the models.
            listed_again, _ = await self._list_models()
            if not models <= listed_again and self._has_forgotten(listed_again, begun):
                return
        # If there are too many names to read them all, workers that announced themselves may not be among those read.
        found |= await self._records.some(announced - found.keys(), pauses, MOST_STRANGE_BYTES)
        kept = self._kept(begun) | unread
        beats = {**self._state.records_of(kept), **found}
        beats = {**self._choose_heard(beats, announced - found.keys()), **beats}
        if not are_all:  # the names of the other models are not known
            models = self._state.models
        models |= kept | {model for model, _ in beats}
        self._state.replace_records(models, beats, begun - keys.HEARTBEAT_INTERVAL_S, are_all=are_all)
        self._read_at = begun
        self._worked_s = pauses.worked_s
        self._notify()

    def _choose_heard(self, found: Mapping[WorkerKey, Heartbeat], left: set[WorkerKey]) -> dict[WorkerKey, Heartbeat]:
        """Return the last records of workers that stay in the fleet though they are not in `found`, and have their
        records upheld. `left`: workers that announced a change and have no record, so they have left by themselves."""
        self._heard.forget(left)
        missing = self._heard.only(self._state.not_draining(self._state.workers - found.keys() - left))
        late = self._state.not_draining(self._records.late & found.keys())
        self._heard.uphold(missing, {key: found[key] for key in late if not found[key].draining})
        return missing

    async def _list_models(self) -> tuple[frozenset[str], bool]:
        """Return the models in Redis, as far as they can be read, and whether these are all models in Redis."""
        listed = await self._records.models()
        models, are_all = (listed.found, listed.are_all) if listed else (self._state.models, True)
        return (models if are_all else models | self._state.served), are_all

    def _has_forgotten(self, models: frozenset[str], now: float) -> bool:
        """Return whether Redis lost its data in the last PATIENCE_S. It did if `models` lacks one that has workers."""
        if self._forgot_at is None and not self._state.served <= models:
            self._forgot_at = now
        if self._forgot_at is not None and now - self._forgot_at < PATIENCE_S:
            self._read_all = True
            return True
        self._forgot_at = None
        return False

    def _kept(self, now: float) -> frozenset[str]:
        """Return the models whose last records are kept: Redis refuses their workers' writes, or did until lately."""
        refused = [model for model in self._state.served if not self._takes_writes(model)]
        self._kept_until |= dict.fromkeys(refused, now + PATIENCE_S)
        self._kept_until = {model: until for model, until in self._kept_until.items() if until > now}
        return frozenset(self._kept_until)

    async def _read_announced(self) -> None:
        begun, workers = time.monotonic(), sorted(self._announced)
        self._announced.clear()
        found = await self._records.some(workers, Pauses())
        self._heard.forget(set(workers) - found.keys())
        self._state.update_records(workers, found, begun - keys.HEARTBEAT_INTERVAL_S)
        self._notify()

    async def _resync(self, workers: tuple[WorkerKey, ...]) -> None:
        if not workers:
            return
        read_at = time.monotonic() - keys.HEARTBEAT_INTERVAL_S
        # Records first: a restarted worker writes both at once. In the other order, the hashes of its old process could
        # be taken for those of the new one.
        pauses = Pauses()
        records = await self._records.some(workers, pauses)
        hashes = await self._records.prefix_hashes(workers, pauses)
        for key in workers:
            self._state.resync(key, records.get(key), hashes.get(key), read_at)
            await pauses.rest()
        self._notify()

    def _notify(self) -> None:
        snapshot = self.snapshot
        membership = snapshot.membership()
        if membership != self._membership:
            self._membership = membership
            for listener in self._listeners:
                listener(snapshot)


def _worker_key(name: str) -> WorkerKey | None:
    """Return the model and worker of a record's key in Redis; None for any other text."""
    model, found, worker = name.removeprefix("pd:{").rpartition("}:worker:")
    return (model, worker) if found and keys.worker(model, worker) == name else None
