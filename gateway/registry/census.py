"""What is known of all workers, put together from their records, their heads and their news. Memory only, no Redis.

A worker's news are numbered, and its record and heads say which number they are as of. Heads are exact when they and
the news after them leave no number out. A worker of which that is not true is ill: its record and heads are to be read
again, until it is. Meanwhile it is ranked by what is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from msgspec.structs import replace

from gateway.registry.adapter_names import NOTHING, Contents, agreed, callable_adapters, contents_of
from gateway.registry.records import Heads, Place
from gateway.registry.snapshot import FleetSnapshot
from gateway.routing.pool import Pool, PoolBook
from gateway.routing.standing import with_load
from workers.protocol.heartbeat import Heartbeat
from workers.protocol.news import News

REMEMBERED = 16
"""News of each worker, to bring heads up to date that were written before them: some seconds of them."""

REMEMBERED_S = 300.0
"""How long a name is still known after its model left Redis or its last worker went: a moment ago it could be called,
so it is unavailable, and not unknown."""

NO_POOL = Pool()
NO_HEADS = Heads(0, {})


class Census:
    """Not for two tasks at a time."""

    def __init__(self, registered: Callable[[], Mapping[str, Contents]]) -> None:
        """`registered`: model -> adapters that all its workers are to have -> SHA-256."""
        self._registered = registered
        self._models: frozenset[str] = frozenset()
        self._named_at: dict[str, float] = {}
        """Model -> when it was last among those of Redis."""
        self._served_at: dict[str, float] = {}
        """Model -> when it last had a worker."""
        self._records: dict[str, dict[str, Heartbeat]] = {}
        """As they were read: by model, by worker."""
        self._books: dict[str, PoolBook] = {}
        self._lately: dict[Place, deque[News]] = {}
        self._ill: dict[Place, None] = {}
        """In the order in which they fell ill."""
        self._once_more: set[Place] = set()
        """Those that did not get well."""
        self._strangers: set[Place] = set()
        """Who told something, and had no record that can be read."""
        self._behind: dict[Place, int] = {}
        """Workers whose record knew of news that had not been read yet, and of which."""
        self._contents: dict[str, Contents] = {}
        self._is_read = False
        self._snapshot: FleetSnapshot | None = FleetSnapshot(is_read=False)

    @property
    def num_workers(self) -> int:
        return sum(map(len, self._records.values()))

    @property
    def models(self) -> frozenset[str]:
        """Those that Redis has, or had a moment ago."""
        return self._models

    @property
    def served(self) -> frozenset[str]:
        """Models that have workers."""
        return frozenset(model for model, workers in self._records.items() if workers)

    def records_of(self, models: Iterable[str]) -> dict[Place, Heartbeat]:
        """As they were read last."""
        return {(model, worker): beat for model in models for worker, beat in self._records.get(model, {}).items()}

    @property
    def ill(self) -> tuple[Place, ...]:
        """Those to be healed, the longest ill first."""
        return tuple(self._ill)

    @property
    def snapshot(self) -> FleetSnapshot:
        """As of the last change; the same object while nothing changes."""
        if self._snapshot is None:
            self._snapshot = self._drawn()
        return self._snapshot

    def pool(self, model: str) -> Pool:
        book = self._books.get(model)
        return book.pool if book else NO_POOL

    def read_all(self, models: frozenset[str], beats: Mapping[Place, Heartbeat], now: float) -> None:
        """Every record there is. Who is not in it is gone; names are remembered for a while (REMEMBERED_S)."""
        self._named_at |= dict.fromkeys(models, now)
        self._named_at = {model: at for model, at in self._named_at.items() if now - at < REMEMBERED_S}
        self._models = frozenset(self._named_at)
        self._is_read = True
        self._records = {}
        for (model, worker), beat in beats.items():
            self._records.setdefault(model, {})[worker] = beat
        for model in self._books.keys() | self._records.keys():
            self._settle(model, now)
        for place in self._lately.keys() - beats.keys():
            self._forget(place)
        self._ill.update(dict.fromkeys(self._once_more))
        self._once_more.clear()
        self._strangers.clear()
        self._agree(now)

    def read_some(self, places: Iterable[Place], beats: Mapping[Place, Heartbeat], now: float) -> None:
        """The records of these workers, as far as they have one."""
        touched = set()
        for place in places:
            model, worker = place
            touched.add(model)
            records = self._records.setdefault(model, {})
            if place in beats:
                records[worker] = beats[place]
                self._name(model, now)
            elif records.pop(worker, None):
                self._forget(place)
        for model in touched:
            self._settle(model, now)
        self._agree(now)

    def hear(self, news: News, now: float) -> bool:
        """One entry, told at `now`. True where it changed who serves."""
        place = (news.model, news.worker)
        lately = self._lately.setdefault(place, deque(maxlen=REMEMBERED))
        if lately and lately[-1].boot != news.boot:
            lately.clear()
        lately.append(news)
        book = self._books.get(news.model)
        known = book.beat(news.worker) if book else None
        if book is None or known is None or not book.apply(news, now):
            if place not in self._strangers:
                self._ill[place] = None
            return False
        self._snapshot = None
        return known.draining != news.draining

    def heal(self, place: Place, record: Heartbeat | None, heads: Heads | None, now: float) -> None:
        """A worker's record and heads, as they were written; None: there is none. What it told since is added."""
        model, worker = place
        self._ill.pop(place, None)
        if record is None:
            self._strangers.add(place)
            return
        book = self._books.setdefault(model, PoolBook())
        self._records.setdefault(model, {})[worker] = record
        self._name(model, now)
        news = [one for one in self._lately.get(place, ()) if one.boot == record.boot]
        known = book.beat(worker)
        least = known.version if known is not None and known.boot == record.boot else 0
        if heads is not None and not _is_whole(heads.version, news, max(least, record.version)):
            self._once_more.add(place)
        (beat,) = agreed([record], self._contents.get(model, NOTHING))
        if news and news[-1].version > record.version:
            beat = with_load(beat, news[-1].load, news[-1].draining, news[-1].version)
        book.join(beat, _followed(heads or NO_HEADS, news), now=now)
        self._snapshot = None

    def _settle(self, model: str, now: float) -> None:
        """The book of a model follows its records."""
        records = self._records.get(model, {})
        contents = contents_of(records.values(), self._registered().get(model, NOTHING))
        beats = agreed(records.values(), contents)
        book = self._books.setdefault(model, PoolBook())
        for worker in book.workers():
            if worker not in records:
                book.leave(worker)
                self._forget((model, worker))
        for beat in beats:
            self._renew(book, (model, beat.worker), beat, now)
        if not records:
            del self._books[model]

    def _renew(self, book: PoolBook, place: Place, beat: Heartbeat, now: float) -> None:
        known = book.beat(beat.worker)
        if known is None or known.boot != beat.boot:
            book.join(beat, now=now)
            self._ill[place] = None
            return
        if known.version < self._behind.pop(place, 0):
            self._ill[place] = None
        if known.version < beat.version:
            self._behind[place] = beat.version  # its news may be on their way; not for long
            beat = replace(beat, version=known.version)
        book.renew(beat, now=now)

    def _forget(self, place: Place) -> None:
        self._lately.pop(place, None)
        self._ill.pop(place, None)
        self._once_more.discard(place)
        self._behind.pop(place, None)

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
    """Whether heads as of that number and the news after them, in order, leave none out up to `least`."""
    versions = [one.version for one in news if one.version > heads]
    return versions == list(range(heads + 1, heads + 1 + len(versions))) and heads + len(versions) >= least


def _followed(heads: Heads, news: Sequence[News]) -> set[int]:
    """The heads after these news, as far as they were not in them."""
    there = set(heads.tokens)
    for one in news:
        if one.version > heads.version:
            there.difference_update(one.dropped)
            there.update(one.added)
    return there
