"""Tracks the models that have not had their first worker yet, as far as this gateway process has seen."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from gateway.registry.snapshot import FleetSnapshot


class FirstWorkers:
    """The models that are meant to have workers and whose first one is still awaited, for a bounded time.

    A worker that was seen and is lost again counts as come: calls are held until it is back. So does a model that does
    not come in time: a new gateway would otherwise not serve the models that are there, because of a broken one.
    """

    def __init__(self, models: frozenset[str], wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`models`: those that are meant to have workers. `wait_s`: how long to wait; 0: until they have come."""
        self._missing = models
        self._clock = clock
        self._until = clock() + (wait_s or math.inf)

    def follow(self, snapshot: FleetSnapshot) -> None:
        """Take off the models that have a worker now; one that drains does not count."""
        if self._missing:
            self._missing -= {
                model for model, beats in snapshot.workers.items() if any(not beat.draining for beat in beats)
            }

    @property
    def missing(self) -> frozenset[str]:
        """Return the models that are still waited for."""
        return self._missing if self._clock() < self._until else frozenset()
