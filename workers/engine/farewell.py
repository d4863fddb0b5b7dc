"""Writing idle prefixes to the disk tier while the last calls of a worker that is about to end still run.

A worker that continues one of these conversations meanwhile finds it there. `Stepper.write_out` writes what is left at
the end.
"""

from __future__ import annotations

import time
from collections import deque

from workers.engine.cache import PrefixCache
from workers.engine.disk_link import DiskLink
from workers.engine.prefix import Block

LOOK_S = 0.1
"""Seconds between two looks for prefixes that became idle meanwhile."""


class Farewell:
    """Offers idle prefixes to the disk tier, some in each step. Belongs to the engine's thread."""

    def __init__(self, cache: PrefixCache, disk: DiskLink) -> None:
        self._cache = cache
        self._disk = disk
        self._due: deque[Block] = deque()
        self._offered: set[Block] = set()
        """Blocks in RAM that the tier has taken."""
        self._look_at = 0.0
        disk.tell()

    def go_on(self, seconds: float) -> None:
        """Copy idle prefixes to RAM and offer the blocks there to the disk tier, for about `seconds`."""
        now = time.monotonic()
        until = now + seconds
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._look(until)
        while self._due and time.monotonic() < until:
            if not self._disk.offer(self._due[0]):
                return
            self._offered.add(self._due.popleft())

    def _look(self, until: float) -> None:
        """Queue the prefixes that became idle since the last look, the latest used first."""
        self._cache.save_idle(lambda block: time.monotonic() < until)
        in_ram = self._cache.ram.blocks
        self._offered &= in_ram
        self._due = deque(sorted(in_ram - self._offered, key=lambda block: (-block.touched, block.start)))
