"""Where a call stands in the line, as far as its gateway knows: what a caller that waits is told."""

from __future__ import annotations

import time
from collections.abc import Callable


class Standing:
    """Written by whoever waits for a slot, read by whoever talks to the caller meanwhile."""

    __slots__ = ("_told_at", "_wait_s", "filed", "for_worker", "on_wait", "position", "predicted_s")

    def __init__(self) -> None:
        self.filed = 0
        """Position in the line when the call was filed, from 1; 0: it never had to wait."""
        self.position = 0
        """Position by the latest news; 0: it does not wait now."""
        self.for_worker = False
        """Its model has no worker: it waits for the first one, and how long is not known."""
        self.predicted_s: float | None = None
        """How long it was predicted to wait when it was filed; None: it never had to, or nobody could know."""
        self.on_wait: Callable[[], None] | None = None
        """Called whenever it waits, in line or aside."""
        self._wait_s = 0.0
        self._told_at = 0.0

    def waits(self, position: int, wait_s: float, *, for_worker: bool = False) -> None:
        """`wait_s`: predicted, from now on."""
        self.for_worker = for_worker
        if not self.filed:
            self.filed, self.predicted_s = position, None if for_worker else wait_s
        self.position = position
        self._wait_s = wait_s
        self._told_at = time.monotonic()
        self.waits_aside()

    def waits_aside(self) -> None:
        """Tell that the call waits, in line, or for a worker or an adapter to come."""
        if self.on_wait is not None:
            self.on_wait()

    def served(self) -> None:
        """It has a slot, or waits no more."""
        self.position = 0

    @property
    def wait_s(self) -> float:
        """What is left of the predicted wait; 0 where it should be over, or nobody waits."""
        return max(0.0, self._told_at + self._wait_s - time.monotonic()) if self.position else 0.0
