"""One model's workers as the ranking reads them (`Pool`), and the book that keeps them up to date (`PoolBook`).

A `Pool` does not change, but for its index of heads (prefix hashes): all pools of a book share it and news change
it, because a copy would cost more than all else here. The ranking reads a pool and is done before the event loop
turns; a caller that holds a pool for longer sees the heads of that moment, some of workers that the pool does not
have.

Workers that are about equally fast, sorted by when they are ready.
"""

from __future__ import annotations

from bisect import bisect_left, insort_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, log
from operator import attrgetter
from types import MappingProxyType

from gateway.routing.prefix_index import HeadIndex
from gateway.routing.worker_state import Standing, Typical, standing, typical_of, with_load
from workers.protocol.heartbeat import MAX_HEADS, PROTOCOL_VERSION, Heartbeat, News

SPEED_STEP = 1.25
"""Factor within which the prefill speeds of one class lie; its workers are gone through by readiness alone."""

_ready_at = attrgetter("ready_at")
_prefill_ms = attrgetter("prefill_ms")


@dataclass(frozen=True, slots=True)
class SpeedClass:
    """The workers of one class at one moment."""

    prefill_ms: float
    """Milliseconds per prompt token of the fastest worker."""
    by_readiness: tuple[Standing, ...]


class SpeedClasses:
    """All speed classes, kept sorted as workers come and go; a change costs the logarithm of their number."""

    def __init__(self) -> None:
        self._sorted: dict[int, list[Standing]] = {}
        self._drawn: dict[int, SpeedClass] = {}
        """Speed -> class as last drawn, of classes that have not changed since."""

    def add(self, there: Standing) -> None:
        speed = _speed(there)
        insort_right(self._sorted.setdefault(speed, []), there, key=_ready_at)
        self._drawn.pop(speed, None)

    def remove(self, there: Standing) -> None:
        """Remove a worker. Raises ValueError for one that is not in its class."""
        speed = _speed(there)
        members = self._sorted.get(speed, [])
        del members[members.index(there, bisect_left(members, there.ready_at, key=_ready_at))]
        self._drawn.pop(speed, None)
        if not members:
            del self._sorted[speed]

    def draw(self) -> tuple[SpeedClass, ...]:
        """Return the classes as they are now, the fastest first."""
        for speed, members in self._sorted.items():
            if speed not in self._drawn:
                self._drawn[speed] = SpeedClass(min(map(_prefill_ms, members)), tuple(members))
        return tuple(self._drawn[speed] for speed in sorted(self._sorted))


def _speed(there: Standing) -> int:
    return floor(log(there.prefill_ms, SPEED_STEP))


TYPICAL_FOR_S = 1.0
"""Seconds after which a pool's typical figures are computed anew."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The state of a model's workers that `rank` and `explain` read. `heads` is shared with later pools (above)."""

    standings: Mapping[str, Standing] = field(default_factory=lambda: MappingProxyType({}))
    """Worker -> its state, in the order in which they came; draining ones as well."""
    numbered: Sequence[Standing | None] = ()
    """Workers at the index `Standing.number`; None: that number is unused, or its worker serves no more."""
    classes: tuple[SpeedClass, ...] = ()
    typical: Typical = field(default_factory=Typical)
    slots: int = 0
    """Slots of all workers that serve."""
    n_ctx: int = 0
    """Least context size of the workers that serve, tokens."""
    adapters: frozenset[str] = frozenset()
    """Adapters that all workers that serve have."""
    heads: HeadIndex = field(default_factory=HeadIndex)

    def by_id(self) -> list[Heartbeat]:
        """Return the workers by id, the order in which slots are numbered (`slot_numbers`)."""
        return [self.standings[worker].beat for worker in sorted(self.standings)]


class PoolBook:
    """Applies records and news of a model's workers. A change costs what it touches; `pool` rebuilds what has moved."""

    def __init__(self) -> None:
        self._heads = HeadIndex()
        self._standings: dict[str, Standing] = {}
        self._numbered: list[Standing | None] = []
        self._unused: list[int] = []
        self._guessed: set[str] = set()
        self._classes = SpeedClasses()
        self._typical: Typical | None = None
        self._typical_at = 0.0
        self._common: tuple[int, int, frozenset[str]] | None = None
        self._pool: Pool | None = Pool(heads=self._heads)

    @property
    def pool(self) -> Pool:
        """The pool as of the last change; the same object while nothing changes."""
        if self._pool is None:
            self._pool = self._drawn()
        return self._pool

    def beat(self, worker: str) -> Heartbeat | None:
        there = self._standings.get(worker)
        return there.beat if there else None

    def workers(self) -> tuple[str, ...]:
        return tuple(self._standings)

    def join(self, beat: Heartbeat, heads: Iterable[int] = (), *, now: float = 0.0) -> None:
        """Take in a worker that is new, was restarted, or whose news were missed: it has these heads and no others."""
        there = self._standings.get(beat.worker)
        number = there.number if there else self._next_number()
        self._heads.forget(number)
        self._heads.add(number, heads)
        self._put(number, beat, now)

    def renew(self, beat: Heartbeat, *, now: float) -> None:
        """Apply a worker's record, but keep the load of its last news where that is newer. Raises KeyError for a
        worker that has not joined.
        """
        there = self._standings[beat.worker]
        known = there.beat
        if known.boot == beat.boot and known.version > beat.version:
            beat = with_load(beat, known.load, known.draining, known.version)
        if beat != known:
            # A record that includes the last news was written with them or later.
            self._put(there.number, beat, there.heard_at if beat.load == known.load else max(now, there.heard_at))

    def apply(self, news: News, now: float) -> bool:
        """Apply an entry of a worker's news, told at `now`; one that is known already changes nothing. Return False
        where an entry before it was missed, the process is not known, or it has more heads now than any worker: it has
        to `join` anew.
        """
        there = self._standings.get(news.worker)
        if there is None or there.beat.boot != news.boot or news.version > there.beat.version + 1:
            return False
        if news.version <= there.beat.version:
            return True
        if news.dropped:
            self._heads.drop(there.number, news.dropped)
        if news.added:
            self._heads.add(there.number, news.added)
        self._put(there.number, with_load(there.beat, news.load, news.draining, news.version), now)
        return self._heads.count(there.number) <= MAX_HEADS

    def leave(self, worker: str) -> None:
        """Remove a worker that is gone; one that is not known is ignored."""
        gone = self._standings.pop(worker, None)
        if gone is None:
            return
        self._heads.forget(gone.number)
        if _serves(gone.beat):
            self._classes.remove(gone)
        self._numbered[gone.number] = None
        self._unused.append(gone.number)
        self._guessed.discard(worker)
        self._typical = self._common = self._pool = None

    def _next_number(self) -> int:
        self._typical = None
        if self._unused:
            return self._unused.pop()
        self._numbered.append(None)
        return len(self._numbered) - 1

    def _put(self, number: int, beat: Heartbeat, heard_at: float) -> None:
        if self._typical is not None and heard_at - self._typical_at > TYPICAL_FOR_S:
            self._typical = None
        before = self._standings.get(beat.worker)
        self._place(before, standing(number, beat, heard_at, self._typical or Typical()))

    def _place(self, before: Standing | None, now: Standing) -> None:
        self._standings[now.worker] = now
        if before is not None and _serves(before.beat):
            self._classes.remove(before)
        serves = _serves(now.beat)
        if serves:
            self._classes.add(now)
        self._numbered[now.number] = now if serves else None
        if before is None or not _alike(before.beat, now.beat):
            self._common = None
        if not now.known:
            self._guessed.add(now.worker)
        elif before is None or not before.known:
            self._guessed.discard(now.worker)
        self._pool = None

    def _drawn(self) -> Pool:
        if self._typical is None:
            self._typical = typical_of(there.beat for there in self._standings.values())
            self._typical_at = max((there.heard_at for there in self._standings.values()), default=0.0)
            for worker in tuple(self._guessed):
                there = self._standings[worker]
                self._place(there, standing(there.number, there.beat, there.heard_at, self._typical))
        return Pool(
            MappingProxyType(dict(self._standings)),
            tuple(self._numbered),
            self._classes.draw(),
            self._typical,
            *self._common_facts(),
            self._heads,
        )

    def _common_facts(self) -> tuple[int, int, frozenset[str]]:
        """Return the slots, the least n_ctx and the common adapters of the workers that serve."""
        if self._common is None:
            beats = [there.beat for there in self._numbered if there is not None]
            self._common = (
                sum(beat.slots for beat in beats),
                min((beat.n_ctx for beat in beats), default=0),
                frozenset[str]()
                .union(*(beat.adapters for beat in beats[:1]))
                .intersection(*(beat.adapters for beat in beats[1:])),
            )
        return self._common


def _alike(one: Heartbeat, other: Heartbeat) -> bool:
    """Return whether two records of a worker agree in all that `_common_facts` reads."""
    return (
        one.draining == other.draining
        and one.slots == other.slots
        and one.n_ctx == other.n_ctx
        and one.protocol == other.protocol
        and one.adapters == other.adapters
    )


def _serves(beat: Heartbeat) -> bool:
    return not beat.draining and beat.protocol == PROTOCOL_VERSION and beat.slots > 0
