"""Combines the records, prefix hashes (heads) and news of all workers. Memory only, no Redis.

A worker's news are numbered, and its record and heads say which number they are as of. Heads are exact when they and
the news after them leave no number out. A worker of which that is not true is ill: its record and heads are read again
until it is. Meanwhile it is ranked by what is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from msgspec.structs import replace

from gateway.adapters.names import NOTHING, Contents, agreed, callable_adapters, contents_of
from gateway.registry.records import Heads, WorkerKey
from gateway.registry.snapshot import FleetSnapshot
from gateway.routing.pool import Pool, PoolUpdater
from gateway.routing.worker_state import with_load
from workers.protocol.heartbeat import MAX_HEADS, Heartbeat, News

REMEMBERED = 16
"""News kept per worker, some seconds of them, to bring heads up to date that were written before them."""

REMEMBERED_S = 300.0
"""Seconds for which a name is still known after its model left Redis or its last worker went: a moment ago it could be
called, so it is unavailable, and not unknown."""

MOST_NAMES = 20_000
"""Most names that are remembered so; anything that may write to Redis may write names."""

MOST_STRANGE_HEADS = 1 << 20
"""Most heads, and as many as STRANGE_NEWS for each entry, in news of workers that are not known; later ones are not
kept until all records were read."""
STRANGE_NEWS = 64

NO_POOL = Pool()
NO_HEADS = Heads(0, {})


class Census:
    """The state of all workers as this gateway knows it. Not for two tasks at a time."""

    def __init__(self, registered: Callable[[], Mapping[str, Contents]]) -> None:
        """`registered`: model -> adapters that all its workers are to have -> SHA-256."""
        self._registered = registered
        self._models: frozenset[str] = frozenset()
        self._named_at: dict[str, float] = {}
        """Model -> when it was last in Redis."""
        self._served_at: dict[str, float] = {}
        """Model -> when it last had a worker."""
        self._records: dict[str, dict[str, Heartbeat]] = {}
        """Model -> worker -> its record as it was read."""
        self._books: dict[str, PoolUpdater] = {}
        self._lately: dict[WorkerKey, deque[News]] = {}
        self._ill: dict[WorkerKey, None] = {}
        """Workers whose heads are not exact, in the order in which they fell ill."""
        self._once_more: set[WorkerKey] = set()
        """Workers that were read again and are still ill."""
        self._strangers: set[WorkerKey] = set()
        """Workers that told news, and had no record that can be read."""
        self._strange_heads = 0
        """Of MOST_STRANGE_HEADS, since all records were read."""
        self._behind: dict[WorkerKey, int] = {}
        """Worker whose record included news that had not been read yet -> the number of those news."""
        self._contents: dict[str, Contents] = {}
        self._is_read = False
        self._snapshot: FleetSnapshot | None = FleetSnapshot(is_read=False)

    @property
    def num_workers(self) -> int:
        return sum(map(len, self._records.values()))

    @property
    def records(self) -> Mapping[str, Mapping[str, Heartbeat]]:
        """Model -> worker -> its record as it was read; not to be kept."""
        return self._records

    @property
    def models(self) -> frozenset[str]:
        """Models that Redis has, or had within REMEMBERED_S."""
        return self._models

    @property
    def served(self) -> frozenset[str]:
        """Models that have workers."""
        return frozenset(model for model, workers in self._records.items() if workers)

    def records_of(self, models: Iterable[str]) -> dict[WorkerKey, Heartbeat]:
        """Return the records of these models' workers, as they were read last."""
        return {(model, worker): beat for model in models for worker, beat in self._records.get(model, {}).items()}

    @property
    def ill(self) -> tuple[WorkerKey, ...]:
        """Workers to be healed, the longest ill first."""
        return tuple(self._ill)

    @property
    def snapshot(self) -> FleetSnapshot:
        """The snapshot as of the last change; the same object while nothing changes."""
        if self._snapshot is None:
            self._snapshot = self._drawn()
        return self._snapshot

    def pool(self, model: str) -> Pool:
        book = self._books.get(model)
        return book.pool if book else NO_POOL

    def read_all(
        self, models: frozenset[str], beats: Mapping[WorkerKey, Heartbeat], now: float, *, are_all: bool = True
    ) -> None:
        """Take in all records there are. A worker without one is gone; names are remembered for REMEMBERED_S.
        `are_all`: whether there is no other model.
        """
        self._named_at |= dict.fromkeys(models, now)
        named = sorted(self._named_at.items(), key=lambda item: (item[0] in self._records, item[1]), reverse=True)
        self._named_at = {model: at for model, at in named[:MOST_NAMES] if now - at < REMEMBERED_S}
        self._models = frozenset(self._named_at)
        self._is_read = self._is_read or are_all
        self._records = {}
        for (model, worker), beat in beats.items():
            self._records.setdefault(model, {})[worker] = beat
        for model in self._books.keys() | self._records.keys():
            self._settle(model, now)
        for key in self._lately.keys() - beats.keys():
            self._forget(key)
        self._ill.update(dict.fromkeys(self._once_more))
        self._once_more.clear()
        self._strangers.clear()
        self._strange_heads = 0
        self._agree(now)

    def read_some(self, workers: Iterable[WorkerKey], beats: Mapping[WorkerKey, Heartbeat], now: float) -> None:
        """Take in the records of these workers; one without a record is gone."""
        touched = set()
        for key in workers:
            model, worker = key
            touched.add(model)
            records = self._records.setdefault(model, {})
            if key in beats:
                records[worker] = beats[key]
                self._name(model, now)
            elif records.pop(worker, None):
                self._forget(key)
        for model in touched:
            self._settle(model, now)
        self._agree(now)

    def hear(self, news: News, now: float) -> bool:
        """Apply an entry of news, told at `now`. Return True where it changed whether the worker drains."""
        key = (news.model, news.worker)
        book = self._books.get(news.model)
        known = book.beat(news.worker) if book else None
        if known is None:
            self._strange_heads += STRANGE_NEWS + len(news.added) + len(news.dropped)
            if self._strange_heads > MOST_STRANGE_HEADS:
                return False
        lately = self._lately.setdefault(key, deque(maxlen=REMEMBERED))
        if lately and lately[-1].boot != news.boot:
            lately.clear()
        lately.append(news)
        if book is None or known is None or not book.apply(news, now):
            if key not in self._strangers:
                self._ill[key] = None
            return False
        self._snapshot = None
        return known.draining != news.draining

    def heal(self, key: WorkerKey, record: Heartbeat | None, heads: Heads | None, now: float) -> None:
        """Take in an ill worker's record and heads as written, None: there are none, and apply the news since then."""
        model, worker = key
        self._ill.pop(key, None)
        if record is None:
            self._strangers.add(key)
            return
        book = self._books.setdefault(model, PoolUpdater())
        self._records.setdefault(model, {})[worker] = record
        self._name(model, now)
        news = [one for one in self._lately.get(key, ()) if one.boot == record.boot]
        known = book.beat(worker)
        least = known.version if known is not None and known.boot == record.boot else 0
        if heads is not None and not _is_whole(heads.version, news, max(least, record.version)):
            self._once_more.add(key)
        (beat,) = agreed([record], self._contents.get(model, NOTHING))
        if news and news[-1].version > record.version:
            beat = with_load(beat, news[-1].load, news[-1].draining, news[-1].version)
        book.join(beat, _followed(heads or NO_HEADS, news), now=now)
        self._snapshot = None

    def _settle(self, model: str, now: float) -> None:
        """Bring the book of a model in line with its records."""
        records = self._records.get(model, {})
        contents = contents_of(records.values(), self._registered().get(model, NOTHING))
        beats = agreed(records.values(), contents)
        book = self._books.setdefault(model, PoolUpdater())
        for worker in book.workers():
            if worker not in records:
                book.leave(worker)
                self._forget((model, worker))
        for beat in beats:
            self._renew(book, (model, beat.worker), beat, now)
        if not records:
            del self._books[model]

    def _renew(self, book: PoolUpdater, key: WorkerKey, beat: Heartbeat, now: float) -> None:
        known = book.beat(beat.worker)
        if known is None or known.boot != beat.boot:
            book.join(beat, now=now)
            self._ill[key] = None
            return
        if known.version < self._behind.pop(key, 0):
            self._ill[key] = None
        if known.version < beat.version:
            self._behind[key] = beat.version  # its news may be on their way; not for long
            beat = replace(beat, version=known.version)
        book.renew(beat, now=now)

    def _forget(self, key: WorkerKey) -> None:
        self._lately.pop(key, None)
        self._ill.pop(key, None)
        self._once_more.discard(key)
        self._behind.pop(key, None)

    def _name(self, model: str, now: float) -> None:
        self._named_at[model] = now
        self._models |= {model}

    def _agree(self, now: float) -> None:
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

    def _drawn(self) -> FleetSnapshot:
        workers = {model: tuple(book.pool.by_id()) for model, book in self._books.items()}
        return FleetSnapshot(
            MappingProxyType({model: beats for model, beats in workers.items() if beats}),
            self._models,
            MappingProxyType(callable_adapters(self._contents)),
            MappingProxyType(self._contents),
            self._is_read,
        )


def _is_whole(heads: int, news: Sequence[News], least: int) -> bool:
    """Return whether heads as of that number and the news after them, in order, leave none out up to `least`."""
    versions = [one.version for one in news if one.version > heads]
    return versions == list(range(heads + 1, heads + 1 + len(versions))) and heads + len(versions) >= least


def _followed(heads: Heads, news: Sequence[News]) -> set[int]:
    """Return the heads after applying the news that they do not include yet, unless no worker has so many."""
    there = set(heads.tokens)
    for one in news:
        if one.version > heads.version:
            there.difference_update(one.dropped)
            there.update(one.added)
    return there if len(there) <= MAX_HEADS else set(heads.tokens)
