"""What a worker that is about to end hands on while its last calls still run: idle prefixes, to the disk tier.

Whoever takes up a conversation elsewhere meanwhile finds it there. What is left at the end is written by
`Stepper.write_out`.
"""

from __future__ import annotations

import time
from collections import deque

from workers.engine.cache import PrefixCache
from workers.engine.disk_link import DiskLink
from workers.engine.prefix import Block

LOOK_S = 0.1
"""How often to look for prefixes that became idle meanwhile."""


class Farewell:
    """Belongs to the engine's thread."""

    def __init__(self, cache: PrefixCache, disk: DiskLink) -> None:
        self._cache = cache
        self._disk = disk
        self._due: deque[Block] = deque()
        self._offered: set[Block] = set()
        """Of those in RAM."""
        self._look_at = 0.0
        disk.tell()

    def go_on(self, seconds: float) -> None:
        """Copies to RAM what is idle, and offers the tier what is there, for about so long."""
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
        """What has become idle since the last time, the latest used first."""
        self._cache.save_idle(lambda block: time.monotonic() < until)
        in_ram = self._cache.ram.blocks
        self._offered &= in_ram
        self._due = deque(sorted(in_ram - self._offered, key=lambda block: (-block.touched, block.start)))
