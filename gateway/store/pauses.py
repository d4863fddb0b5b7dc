"""Lets other tasks run while one works through much that came from Redis at once."""

from __future__ import annotations

import asyncio
import time

LONGEST_S = 0.005
"""Seconds of work after which a task rests as long: it takes half of the event loop at most."""


class Pauses:
    """Counts the work of one task since its last pause. Begin anew after each `await`: others have worked meanwhile."""

    __slots__ = ("_begun", "worked_s")

    def __init__(self) -> None:
        self._begun = time.thread_time()
        self.worked_s = 0.0
        """Seconds of all work before a pause."""

    def begin(self) -> None:
        """Count from now on."""
        self._begun = time.thread_time()

    async def rest(self) -> None:
        """Rest as long as the work took, where it took LONGEST_S; else go on."""
        took_s = time.thread_time() - self._begun
        if took_s >= LONGEST_S:
            self.worked_s += took_s
            await asyncio.sleep(took_s)
            self._begun = time.thread_time()
