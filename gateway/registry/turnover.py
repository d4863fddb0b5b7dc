"""Counts the worker processes that come and go."""

from __future__ import annotations

from collections.abc import Callable

from gateway.registry.snapshot import FleetSnapshot
from workers.protocol.metrics.of_gateway import DRAINED, LOST

MOST_LOST = 1024


class Turnover:
    """Compares each new snapshot with the last. A process that was taken for lost and is back does not count as new."""

    def __init__(self, first: FleetSnapshot, came: Callable[[str], None], went: Callable[[str, str], None]) -> None:
        """Processes in `first` are not new. `came` is told the model, `went` the model and `DRAINED` or `LOST`."""
        self._there = _processes(first)
        self._came = came
        self._went = went
        self._lost: dict[tuple[str, str], None] = {}
        """Processes that were lost last, oldest first, at most MOST_LOST."""

    def changed(self, snapshot: FleetSnapshot) -> None:
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
