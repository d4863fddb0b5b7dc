"""Which models have yet to get their first worker, as far as this gateway process has seen."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from gateway.registry.snapshot import FleetSnapshot


class FirstWorkers:
    """Waits for a worker of each model that is meant to have one, and not for ever.

    A worker that was seen and is lost again makes nobody wait: calls are held until it is back. Nor does a model that
    does not come: a new gateway would otherwise keep back from the models that are there, for one that is broken.
    """

    def __init__(self, models: frozenset[str], wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`models`: those that are meant to have workers. `wait_s` 0: until they have come."""
        self._missing = models
        self._clock = clock
        self._until = clock() + (wait_s or math.inf)

    def follow(self, snapshot: FleetSnapshot) -> None:
        """Look who is there now; a worker that drains answers no more."""
        if self._missing:
            self._missing -= {
                model for model, beats in snapshot.workers.items() if any(not beat.draining for beat in beats)
            }

    @property
    def missing(self) -> frozenset[str]:
        """Return the models that are still waited for."""
        return self._missing if self._clock() < self._until else frozenset()
