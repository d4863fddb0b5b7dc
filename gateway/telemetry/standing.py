"""The queue position of a call, as far as its gateway knows, for a caller that waits."""

from __future__ import annotations

import time
from collections.abc import Callable


class Standing:
    """A call's queue position: admission writes it, the code that answers the caller reads it."""

    __slots__ = ("_told_at", "_wait_s", "filed", "for_worker", "on_wait", "position", "predicted_s")

    def __init__(self) -> None:
        self.filed = 0
        """Position in the queue when the call was filed, from 1; 0: it never had to wait."""
        self.position = 0
        """Latest known position; 0: it does not wait now."""
        self.for_worker = False
        """Whether its model has no worker: it waits for the first one, and how long is not known."""
        self.predicted_s: float | None = None
        """Predicted wait in seconds when it was filed; None: it never had to wait, or it could not be predicted."""
        self.on_wait: Callable[[], None] | None = None
        """Called whenever the call waits, in the queue or not."""
        self._wait_s = 0.0
        self._told_at = 0.0

    def waits(self, position: int, wait_s: float, *, for_worker: bool = False) -> None:
        """Set the position. `wait_s`: predicted seconds from now on."""
        self.for_worker = for_worker
        if not self.filed:
            self.filed, self.predicted_s = position, None if for_worker else wait_s
        self.position = position
        self._wait_s = wait_s
        self._told_at = time.monotonic()
        self.waits_aside()

    def waits_aside(self) -> None:
        """Call `on_wait`: the call waits, in the queue, or for a worker or an adapter to come."""
        if self.on_wait is not None:
            self.on_wait()

    def served(self) -> None:
        """Note that the call has a slot, or waits no more."""
        self.position = 0

    @property
    def wait_s(self) -> float:
        """Seconds left of the predicted wait; 0 where it should be over, or the call does not wait."""
        return max(0.0, self._told_at + self._wait_s - time.monotonic()) if self.position else 0.0
