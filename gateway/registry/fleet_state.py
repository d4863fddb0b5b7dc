"""Combines the records, prefix hashes and news of all workers into the snapshot of the fleet. Does no I/O.

News are a worker's numbered reports of load and cache. The worker's record (its heartbeat) and its prefix hashes each
name the last report included in them. If a later report is missed, the hashes are not exact and the worker is out of
sync: record and hashes are read again until no report is missing, and meanwhile it is ranked by what is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from msgspec.structs import replace

from gateway.adapters.names import NOTHING, Contents, agreed, callable_adapters, contents_of
from gateway.registry.records import PrefixHashes, WorkerKey
from gateway.registry.snapshot import FleetSnapshot
from gateway.routing.pool import Pool, PoolUpdater
from gateway.routing.worker_state import with_load
from workers.protocol.heartbeat import MAX_HEADS, Heartbeat, News

REMEMBERED = 16
"""Number of a worker's last reports (`News`) kept, some seconds' worth, to bring older prefix hashes up to date."""

REMEMBERED_S = 300.0
"""Seconds that a model's name stays known after the model left Redis, and its adapters' names after its last worker
went, as does its own where the catalog does not have it. Calls to them fail as unavailable in this time, later as
unknown."""

MOST_NAMES = 20_000
"""Maximum number of remembered model names. Those of models without workers are forgotten first, and of these the
oldest. Anyone who can write to Redis can add names."""

MOST_STRANGE_HASHES = 1 << 20
STRANGE_NEWS = 64
"""A report (`News`) of an unknown worker counts as this many prefix hashes, plus those in the report. Once the total is
above MOST_STRANGE_HASHES, such reports are dropped until all records have been read again."""

NO_POOL = Pool()
NO_HASHES = PrefixHashes(0, {})


class FleetState:
    """Keeps the state of all workers as this gateway knows it. For use by one task at a time."""

    def __init__(self, registered: Callable[[], Mapping[str, Contents]]) -> None:
        """`registered` returns all registered adapters: model -> adapter -> SHA-256 of its file."""
        self._registered = registered
        self._models: frozenset[str] = frozenset()
        self._named_at: dict[str, float] = {}
        """Model -> time.monotonic() when it was last in Redis."""
        self._served_at: dict[str, float] = {}
        """Model -> time.monotonic() when it last had a worker."""
        self._records: dict[str, dict[str, Heartbeat]] = {}
        """Model -> worker -> its record as last read."""
        self._updaters: dict[str, PoolUpdater] = {}
        self._recent_news: dict[WorkerKey, deque[News]] = {}
        self._out_of_sync: dict[WorkerKey, None] = {}
        """Workers whose prefix hashes are not exact; the one that has been so for longest comes first."""
        self._resync_later: set[WorkerKey] = set()
        """Workers still out of sync after their hashes were read anew; tried again once all records have been read."""
        self._without_record: set[WorkerKey] = set()
        """Workers that have written reports (`News`) but have no record that can be read."""
        self._num_strange_hashes = 0
        """Prefix hashes counted for unknown workers since all records were last read; limit: MOST_STRANGE_HASHES."""
        self._behind: dict[WorkerKey, int] = {}
        """Worker -> number of the last report (`News`) that its record includes, if the report itself is unread."""
        self._contents: dict[str, Contents] = {}
        self._is_read = False
        self._catalog: frozenset[str] | None = None
        self._withdrawn = frozenset[str]()
        self._snapshot: FleetSnapshot | None = FleetSnapshot(is_read=False)

    @property
    def num_workers(self) -> int:
        return sum(map(len, self._records.values()))

    @property
    def records(self) -> Mapping[str, Mapping[str, Heartbeat]]:
        """Model -> worker -> its record as last read. Don't keep the mapping: it changes."""
        return self._records

    @property
    def models(self) -> frozenset[str]:
        """Models that Redis has, or had within the last REMEMBERED_S."""
        return self._models

    @property
    def served(self) -> frozenset[str]:
        """Models that have workers."""
        return frozenset(model for model, workers in self._records.items() if workers)

    def records_of(self, models: Iterable[str]) -> dict[WorkerKey, Heartbeat]:
        """Return the records of these models' workers as last read."""
        return {(model, worker): beat for model in models for worker, beat in self._records.get(model, {}).items()}

    def not_draining(self, workers: Iterable[WorkerKey]) -> dict[WorkerKey, Heartbeat]:
        """Return the records, as last read, of those of the workers that are known and do not drain."""
        found: dict[WorkerKey, Heartbeat] = {}
        for key in workers:
            record, updater = self._records.get(key[0], {}).get(key[1]), self._updaters.get(key[0])
            newest = updater.beat(key[1]) if updater else None  # its news can be newer than its record
            if record is not None and not record.draining and not (newest is not None and newest.draining):
                found[key] = record
        return found

    @property
    def workers(self) -> set[WorkerKey]:
        """Return the workers that had a record when the records were last read."""
        return {(model, worker) for model, workers in self._records.items() for worker in workers}

    @property
    def out_of_sync(self) -> tuple[WorkerKey, ...]:
        """Workers whose record and hashes must be read anew; the one that has waited longest comes first."""
        return tuple(self._out_of_sync)

    @property
    def snapshot(self) -> FleetSnapshot:
        """The snapshot as of the last change; the same object while nothing changes."""
        if self._snapshot is None:
            self._snapshot = self._build_snapshot()
        return self._snapshot

    def pool(self, model: str) -> Pool:
        updater = self._updaters.get(model)
        return updater.pool if updater else NO_POOL

    def limit(self, catalog: frozenset[str] | None, withdrawn: frozenset[str]) -> None:
        """Leave models that Redis names, and the names of their adapters, out of snapshots: those `withdrawn` while
        none of their workers takes calls, and others than the catalog's that have had no worker for REMEMBERED_S.
        `catalog` None: there is none, and all are known. Replaces what an earlier call said."""
        self._catalog, self._withdrawn = catalog, withdrawn
        self._snapshot = None

    def replace_records(
        self, models: frozenset[str], beats: Mapping[WorkerKey, Heartbeat], now: float, *, are_all: bool = True
    ) -> None:
        """Replace all records. A worker that is not in `beats` is gone; the names of `models` are remembered for
        REMEMBERED_S. `are_all`: whether `models` are all models that Redis has."""
        self._named_at |= dict.fromkeys(models, now)
        named = sorted(self._named_at.items(), key=lambda item: (item[0] in self._records, item[1]), reverse=True)
        self._named_at = {model: at for model, at in named[:MOST_NAMES] if now - at < REMEMBERED_S}
        self._models = frozenset(self._named_at)
        self._is_read = self._is_read or are_all
        self._records = {}
        for (model, worker), beat in beats.items():
            self._records.setdefault(model, {})[worker] = beat
        for model in self._updaters.keys() | self._records.keys():
            self._update_pool(model, now)
        for key in self._recent_news.keys() - beats.keys():
            self._forget(key)
        self._out_of_sync.update(dict.fromkeys(self._resync_later))
        self._resync_later.clear()
        self._without_record.clear()
        self._num_strange_hashes = 0
        self._update_contents(now)

    def update_records(self, workers: Iterable[WorkerKey], beats: Mapping[WorkerKey, Heartbeat], now: float) -> None:
        """Replace the records of these workers; a worker that is not in `beats` is gone."""
        touched = set()
        for key in workers:
            model, worker = key
            touched.add(model)
            records = self._records.setdefault(model, {})
            if key in beats:
                records[worker] = beats[key]
                self._note_name(model, now)
            elif records.pop(worker, None):
                self._forget(key)
        for model in touched:
            self._update_pool(model, now)
        self._update_contents(now)

    def apply_news(self, news: News, now: float) -> bool:
        """Apply an entry of news, written at `now`. Return whether the worker's draining began or ended."""
        key = (news.model, news.worker)
        updater = self._updaters.get(news.model)
        known = updater.beat(news.worker) if updater else None
        if known is None:
            self._num_strange_hashes += STRANGE_NEWS + len(news.added) + len(news.dropped)
            if self._num_strange_hashes > MOST_STRANGE_HASHES:
                return False
        recent = self._recent_news.setdefault(key, deque(maxlen=REMEMBERED))
        if recent and recent[-1].boot != news.boot:
            recent.clear()
        recent.append(news)
        if updater is None or known is None or not updater.apply(news, now):
            if key not in self._without_record:
                self._out_of_sync[key] = None
            return False
        self._snapshot = None
        return known.draining != news.draining

    def resync(self, key: WorkerKey, record: Heartbeat | None, hashes: PrefixHashes | None, now: float) -> None:
        """Replace a worker's record and hashes by those just read and apply later news. `record` None: keep the old."""
        model, worker = key
        self._out_of_sync.pop(key, None)
        if record is None:
            self._without_record.add(key)
            return
        updater = self._updaters.setdefault(model, PoolUpdater())
        self._records.setdefault(model, {})[worker] = record
        self._note_name(model, now)
        news = [one for one in self._recent_news.get(key, ()) if one.boot == record.boot]
        known = updater.beat(worker)
        least = known.version if known is not None and known.boot == record.boot else 0
        if hashes is not None and not _is_gapless(hashes.version, news, max(least, record.version)):
            self._resync_later.add(key)
        (beat,) = agreed([record], self._contents.get(model, NOTHING))
        if news and news[-1].version > record.version:
            beat = with_load(beat, news[-1].load, news[-1].draining, news[-1].version)
        updater.join(beat, _with_news(hashes or NO_HASHES, news), now=now)
        self._snapshot = None

    def _update_pool(self, model: str, now: float) -> None:
        """Bring a model's pool up to date with the records of its workers."""
        records = self._records.get(model, {})
        contents = contents_of(records.values(), self._registered().get(model, NOTHING))
        beats = agreed(records.values(), contents)
        updater = self._updaters.setdefault(model, PoolUpdater())
        for worker in updater.workers():
            if worker not in records:
                updater.leave(worker)
                self._forget((model, worker))
        for beat in beats:
            self._update_worker(updater, (model, beat.worker), beat, now)
        if not records:
            del self._updaters[model]

    def _update_worker(self, updater: PoolUpdater, key: WorkerKey, beat: Heartbeat, now: float) -> None:
        known = updater.beat(beat.worker)
        if known is None or known.boot != beat.boot:
            updater.join(beat, now=now)
            self._out_of_sync[key] = None
            return
        if known.version < self._behind.pop(key, 0):
            self._out_of_sync[key] = None
        if known.version < beat.version:
            self._behind[key] = beat.version  # the news in between can be on their way
            beat = replace(beat, version=known.version)
        updater.renew(beat, now=now)

    def _forget(self, key: WorkerKey) -> None:
        self._recent_news.pop(key, None)
        self._out_of_sync.pop(key, None)
        self._resync_later.discard(key)
        self._behind.pop(key, None)

    def _is_unknown(self, model: str, workers: Iterable[Heartbeat]) -> bool:
        """Return whether a model is left out of snapshots (`limit`)."""
        if model in self._withdrawn:
            return all(beat.draining for beat in workers)
        return self._catalog is not None and model not in self._catalog and model not in self._served_at

    def _note_name(self, model: str, now: float) -> None:
        self._named_at[model] = now
        self._models |= {model}

    def _update_contents(self, now: float) -> None:
        registered = self._registered()
        self._served_at |= dict.fromkeys(self.served, now)
        self._served_at = {model: at for model, at in self._served_at.items() if now - at < REMEMBERED_S}
        before, self._contents = self._contents, {}
        for model in self._served_at.keys() | registered.keys():
            wanted = registered.get(model, NOTHING)
            if workers := self._records.get(model):
                self._contents[model] = contents_of(workers.values(), wanted)
            else:
                self._contents[model] = {**before.get(model, NOTHING), **wanted}
        self._snapshot = None

    def _build_snapshot(self) -> FleetSnapshot:
        workers = {model: tuple(updater.pool.by_id()) for model, updater in self._updaters.items()}
        names = self._models | self._contents.keys()
        unknown = {model for model in names if self._is_unknown(model, workers.get(model, ()))}
        named = {model: contents for model, contents in self._contents.items() if model not in unknown}
        return FleetSnapshot(
            MappingProxyType({model: beats for model, beats in workers.items() if beats}),
            self._models - unknown,
            MappingProxyType(callable_adapters(named)),
            MappingProxyType(self._contents),
            self._is_read,
        )


def _is_gapless(included: int, news: Sequence[News], least: int) -> bool:
    """Return whether `news` continues after report number `included` without a gap, up to number `least` or beyond."""
    versions = [one.version for one in news if one.version > included]
    return versions == list(range(included + 1, included + 1 + len(versions))) and included + len(versions) >= least


def _with_news(hashes: PrefixHashes, news: Sequence[News]) -> set[int]:
    """Return the hashes with later news applied, or unchanged if the result would exceed MAX_HEADS."""
    there = set(hashes.tokens)
    for one in news:
        if one.version > hashes.version:
            there.difference_update(one.dropped)
            there.update(one.added)
    return there if len(there) <= MAX_HEADS else set(hashes.tokens)
