"""One model's workers as the ranking reads them (`Pool`), and the code that keeps them up to date (`PoolUpdater`).

A `Pool` does not change, except for its index of prefix hashes. All pools of one updater share that index, and workers'
reports (`News`) change it, as copying it would cost more than all other updates. The ranking reads a pool within one
turn of the event loop. A pool that is kept for longer has newer hashes, some of workers that it does not have.
"""

from __future__ import annotations

from bisect import bisect_left, insort_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, log
from operator import attrgetter
from types import MappingProxyType

from gateway.routing.prefix_hashes import PrefixHashIndex
from gateway.routing.worker_state import Typical, WorkerState, typical_of, with_load, worker_state
from workers.protocol.heartbeat import MAX_HEADS, PROTOCOL_VERSION, Heartbeat, News

SPEED_STEP = 1.25
"""Largest ratio of two prefill speeds in one class of workers. Within a class, the ranking goes by readiness alone."""

_ready_at = attrgetter("ready_at")
_prefill_ms = attrgetter("prefill_ms")


@dataclass(frozen=True, slots=True)
class SpeedClass:
    """Workers that are about equally fast, sorted by the time at which they are ready."""

    prefill_ms: float
    """Milliseconds that the fastest worker of the class takes per prompt token."""
    by_readiness: tuple[WorkerState, ...]


class SpeedClasses:
    """All speed classes of a pool, kept sorted as workers come and go: a worker's place is found by binary search."""

    def __init__(self) -> None:
        self._sorted: dict[int, list[WorkerState]] = {}
        self._drawn: dict[int, SpeedClass] = {}
        """Number of a class (`_speed`) -> the class, as `draw` last returned it; one that changed since is missing."""

    def add(self, state: WorkerState) -> None:
        speed = _speed(state)
        insort_right(self._sorted.setdefault(speed, []), state, key=_ready_at)
        self._drawn.pop(speed, None)

    def remove(self, state: WorkerState) -> None:
        """Remove a worker. Raises ValueError if the worker is not in its class."""
        speed = _speed(state)
        members = self._sorted.get(speed, [])
        del members[members.index(state, bisect_left(members, state.ready_at, key=_ready_at))]
        self._drawn.pop(speed, None)
        if not members:
            del self._sorted[speed]

    def draw(self) -> tuple[SpeedClass, ...]:
        """Return the classes as they are now, the fastest first."""
        for speed, members in self._sorted.items():
            if speed not in self._drawn:
                self._drawn[speed] = SpeedClass(min(map(_prefill_ms, members)), tuple(members))
        return tuple(self._drawn[speed] for speed in sorted(self._sorted))


def _speed(state: WorkerState) -> int:
    return floor(log(state.prefill_ms, SPEED_STEP))


TYPICAL_FOR_S = 1.0
"""Seconds after which a pool's typical figures are computed again."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The state of a model's workers that `rank` and `explain` read. Pools of one updater share `hashes`, which
    changes."""

    states: Mapping[str, WorkerState] = field(default_factory=lambda: MappingProxyType({}))
    """Worker -> its state, in the order in which the workers came; draining workers are included."""
    numbered: Sequence[WorkerState | None] = ()
    """The workers by `WorkerState.number`; None: no worker has that number, or the worker does not serve."""
    classes: tuple[SpeedClass, ...] = ()
    typical: Typical = field(default_factory=Typical)
    slots: int = 0
    """Slots of all workers that serve."""
    n_ctx: int = 0
    """Smallest context size of the workers that serve, in tokens."""
    adapters: frozenset[str] = frozenset()
    """LoRA adapters that all the workers that serve have."""
    hashes: PrefixHashIndex = field(default_factory=PrefixHashIndex)

    def by_id(self) -> list[Heartbeat]:
        """Return the heartbeats of the workers, sorted by worker id, which is the order in which slots are numbered
        (`placement`)."""
        return [self.states[worker].beat for worker in sorted(self.states)]


class PoolUpdater:
    """Applies workers' records and reports (`News`) to the pool of their model; rebuilds only what has changed."""

    def __init__(self) -> None:
        self._hashes = PrefixHashIndex()
        self._states: dict[str, WorkerState] = {}
        self._numbered: list[WorkerState | None] = []
        self._unused: list[int] = []
        self._guessed: set[str] = set()
        self._classes = SpeedClasses()
        self._typical: Typical | None = None
        self._typical_at = 0.0
        self._common: tuple[int, int, frozenset[str]] | None = None
        self._pool: Pool | None = Pool(hashes=self._hashes)

    @property
    def pool(self) -> Pool:
        """The pool as of the last change; the same object as long as nothing changes."""
        if self._pool is None:
            self._pool = self._drawn()
        return self._pool

    def beat(self, worker: str) -> Heartbeat | None:
        state = self._states.get(worker)
        return state.beat if state else None

    def workers(self) -> tuple[str, ...]:
        return tuple(self._states)

    def join(self, beat: Heartbeat, hashes: Iterable[int] = (), *, now: float = 0.0) -> None:
        """Add a worker that is new, was restarted, or some of whose reports (`News`) were missed. `hashes`: all the
        prefix hashes that the worker has now."""
        state = self._states.get(beat.worker)
        number = state.number if state else self._next_number()
        self._hashes.forget(number)
        self._hashes.add(number, hashes)
        self._put(number, beat, now)

    def renew(self, beat: Heartbeat, *, now: float) -> None:
        """Apply a worker's record. If the worker's last report (`News`) is newer, the load in that report stays. Raises
        KeyError if the worker has not joined."""
        state = self._states[beat.worker]
        known = state.beat
        if known.boot == beat.boot and known.version > beat.version:
            beat = with_load(beat, known.load, known.draining, known.version)
        if beat != known:
            # A record that includes the last news was written with them or later.
            self._put(state.number, beat, state.heard_at if beat.load == known.load else max(now, state.heard_at))

    def apply(self, news: News, now: float) -> bool:
        """Apply a worker's report, written at `now`; a report that was applied already has no effect. Return False if
        the worker must `join` again: an earlier report was missed, its process is not known, or it now has more prefix
        hashes than any worker can have."""
        state = self._states.get(news.worker)
        if state is None or state.beat.boot != news.boot or news.version > state.beat.version + 1:
            return False
        if news.version <= state.beat.version:
            return True
        if news.dropped:
            self._hashes.drop(state.number, news.dropped)
        if news.added:
            self._hashes.add(state.number, news.added)
        self._put(state.number, with_load(state.beat, news.load, news.draining, news.version), now)
        return self._hashes.count(state.number) <= MAX_HEADS

    def leave(self, worker: str) -> None:
        """Remove a worker that is gone; an unknown worker is ignored."""
        gone = self._states.pop(worker, None)
        if gone is None:
            return
        self._hashes.forget(gone.number)
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
        before = self._states.get(beat.worker)
        self._place(before, worker_state(number, beat, heard_at, self._typical or Typical()))

    def _place(self, before: WorkerState | None, now: WorkerState) -> None:
        self._states[now.worker] = now
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
            self._typical = typical_of(state.beat for state in self._states.values())
            self._typical_at = max((state.heard_at for state in self._states.values()), default=0.0)
            for worker in tuple(self._guessed):
                state = self._states[worker]
                self._place(state, worker_state(state.number, state.beat, state.heard_at, self._typical))
        return Pool(
            MappingProxyType(dict(self._states)),
            tuple(self._numbered),
            self._classes.draw(),
            self._typical,
            *self._common_facts(),
            self._hashes,
        )

    def _common_facts(self) -> tuple[int, int, frozenset[str]]:
        """Return the number of slots, the smallest n_ctx and the common adapters of the workers that serve."""
        if self._common is None:
            beats = [state.beat for state in self._numbered if state is not None]
            self._common = (
                sum(beat.slots for beat in beats),
                min((beat.n_ctx for beat in beats), default=0),
                frozenset[str]()
                .union(*(beat.adapters for beat in beats[:1]))
                .intersection(*(beat.adapters for beat in beats[1:])),
            )
        return self._common


def _alike(one: Heartbeat, other: Heartbeat) -> bool:
    """Return whether two records of a worker agree in every field that `_common_facts` reads."""
    return (
        one.draining == other.draining
        and one.slots == other.slots
        and one.n_ctx == other.n_ctx
        and one.protocol == other.protocol
        and one.adapters == other.adapters
    )


def _serves(beat: Heartbeat) -> bool:
    return not beat.draining and beat.protocol == PROTOCOL_VERSION and beat.slots > 0
