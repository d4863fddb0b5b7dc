"""Notices what would spoil steps: memory that runs short, and cells that hold what is not a number."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

from workers.process.limits import can_take

PROBE_EVERY_S, PROBE_CALM_S, STEP_BYTES = 0.02, 0.2, 16 << 20
"""`PROBE_EVERY_S`: seconds between two checks whether `STEP_BYTES`, which a step may need, can still be allocated.
`PROBE_CALM_S`: the same while steps repeat one plan: llama.cpp then needs no more memory than for the step before."""

CLEAN_WAIT_S = 1.0
"""Seconds during which no call gets a slot after a call's logits were not numbers (NaN).

Without flash attention, that call's cells spoil all running calls: they soon end too, and then the cache is cleared.
With flash attention the other calls go on, and new calls have no reason to wait longer."""


class MemoryProbe:
    """Tells whether there is memory for a step. Without it, llama.cpp would end the process."""

    def __init__(self, take: Callable[[int], bool] = can_take) -> None:
        """`take` returns whether so many bytes can be allocated now."""
        self._take = take
        self._probed_at = 0.0
        self._plan: Callable[[], object | None] = _nothing
        """Returns the plan of the last check. It is not kept for that: its calls have megabytes of prepared pixels."""

    def has_memory(self, plan: object) -> bool:
        """Return whether a step by this plan has memory, as far as was checked lately."""
        now = time.perf_counter()
        if now - self._probed_at < (PROBE_CALM_S if plan is self._plan() else PROBE_EVERY_S):
            return True
        self._probed_at, self._plan = now, weakref.ref(plan)
        return self._take(STEP_BYTES)


class Spoilage:
    """Remembers that cells hold what is not a number; they are forgotten once nothing runs."""

    def __init__(self) -> None:
        self.is_noted = False
        self._since = 0.0
        """time.monotonic() at which a call first had logits that were not numbers, since the cache was cleared."""

    @property
    def is_fresh(self) -> bool:
        """Return whether new calls should wait, because running ones may end of it."""
        return self.is_noted and time.monotonic() - self._since < CLEAN_WAIT_S

    def note(self) -> None:
        if not self.is_noted:
            self.is_noted, self._since = True, time.monotonic()

    def clear(self) -> None:
        self.is_noted = False


def _nothing() -> None:
    """Return None, as a reference to what is gone does."""
