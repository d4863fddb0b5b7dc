"""The fleet as most of the gateway sees it (`FleetSnapshot`), and two trackers of changes between snapshots.

`FirstWorkers` tracks the models that still wait for their first worker, `Turnover` the processes that come and go.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from gateway.adapters.names import Contents
from gateway.telemetry.metrics import DRAINED, LOST
from workers.protocol.heartbeat import Heartbeat

LONGEST_CONTEXT = 1 << 20
"""Assumed longest context of the fleet, in tokens, while some model has no worker and its context is not known."""


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """The live workers. Workers of another protocol version, and records that can't be read, are left out."""

    workers: Mapping[str, tuple[Heartbeat, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Model -> its live workers by id, including draining ones; only models with workers."""
    models: frozenset[str] = frozenset()
    """Every model that has ever had a worker on this Redis, except those that have left the catalog and whose workers
    are gone or drain, and those that it does not name and that this process has seen no worker of for minutes."""
    adapters: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Adapter -> its model, for the adapters whose names callers can send as `model`."""
    contents: Mapping[str, Contents] = field(default_factory=lambda: MappingProxyType({}))
    """Model -> its adapters, name -> SHA-256 of the file; registered adapters that no worker has yet as well."""
    is_read: bool = True
    """Whether all records have been read once; until then, workers may exist that are not in the snapshot."""

    def of(self, model: str) -> tuple[Heartbeat, ...]:
        return self.workers.get(model, ())

    def longest_context(self, named: Set[str]) -> int:
        """Return the tokens of the longest context in the fleet; LONGEST_CONTEXT as long as some model has no worker.

        `named`: the models of the catalog."""
        if not all(self.workers.get(model) for model in named | self.models):
            return LONGEST_CONTEXT
        return max((beat.n_ctx for beats in self.workers.values() for beat in beats), default=LONGEST_CONTEXT)

    def membership(self) -> frozenset[tuple[str, str, str, str, int, bool]]:
        """Return each worker's model, id, boot id, address, slots, draining. Listeners are told when these change."""
        return frozenset(
            (model, worker.worker, worker.boot, worker.address, worker.slots, worker.draining)
            for model, workers in self.workers.items()
            for worker in workers
        )


class FleetView(Protocol):
    """The fleet, as seen by the parts of the gateway that do not read it from Redis themselves."""

    @property
    def snapshot(self) -> FleetSnapshot:
        """The fleet as of now."""
        ...

    def listen(self, on_change: Callable[[FleetSnapshot], None]) -> None:
        """Have `on_change` called when a worker joins, leaves, restarts, starts or stops draining, or is resized."""
        ...


class FirstWorkers:
    """Tracks which models still wait for their first worker, for a limited time.

    A model counts as waiting until its first worker comes, but no longer than the given time: otherwise one broken
    model would keep a new gateway from serving the other models. It does not count as waiting again if that worker is
    lost: its calls then wait until a worker is back."""

    def __init__(self, models: frozenset[str], wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`models`: the models that should have workers. `wait_s`: seconds to wait; 0: until all of them have one."""
        self._missing = models
        self._clock = clock
        self._until = clock() + (wait_s or math.inf)

    def follow(self, snapshot: FleetSnapshot) -> None:
        """Stop waiting for the models that have a worker now; a draining worker does not count."""
        if self._missing:
            self._missing -= {
                model for model, beats in snapshot.workers.items() if any(not beat.draining for beat in beats)
            }

    def only(self, models: frozenset[str]) -> None:
        """Wait for none but `models` from now on: the others are not meant to have workers any more. Models that were
        not waited for are not waited for now: a gateway that serves stays ready."""
        self._missing &= models

    @property
    def missing(self) -> frozenset[str]:
        """The models that still wait for their first worker."""
        return self._missing if self._clock() < self._until else frozenset()


MOST_LOST = 1024


class Turnover:
    """Reports the worker processes that come and go. A process that was lost and is back does not count as new."""

    def __init__(self, first: FleetSnapshot, came: Callable[[str], None], went: Callable[[str, str], None]) -> None:
        """`first`: the snapshot to compare with at first. `came` is called with the model of each new process; `went`,
        with the model of each process that is gone, and `DRAINED` or `LOST`."""
        self._there = _processes(first)
        self._came = came
        self._went = went
        self._lost: dict[tuple[str, str], None] = {}
        """The processes lost most recently, oldest first; at most MOST_LOST."""

    def update(self, snapshot: FleetSnapshot) -> None:
        """Compare the new snapshot with the last, and report the processes that have come or gone."""
        before, self._there = self._there, _processes(snapshot)
        for process in self._there.keys() - before.keys():
            if process in self._lost:
                del self._lost[process]
            else:
                self._came(process[0])
        for process in before.keys() - self._there.keys():
            self._went(process[0], DRAINED if before[process] else LOST)
            if not before[process]:
                self._lost[process] = None
        while len(self._lost) > MOST_LOST:
            del self._lost[next(iter(self._lost))]


def _processes(snapshot: FleetSnapshot) -> dict[tuple[str, str], bool]:
    """Return (model, boot id) -> whether the process drains."""
    return {(model, beat.boot): beat.draining for model, beats in snapshot.workers.items() for beat in beats}
