"""How long processes stood in line for a processor: what a busy machine adds to what they take."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

SAMPLE_S = 0.1


class Waits:
    """Of some processes, as sampled while they run."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._waited_s: list[float] = []

    def sample(self, pids: Sequence[int]) -> None:
        self._times.append(time.monotonic())
        self._waited_s.append(_waited_s(pids))

    def between(self, begin: float, end: float) -> float:
        """Return what all threads together waited from the last sample before `begin` to the first one after `end`
        (`time.monotonic` seconds).
        """
        first = max(0, bisect_right(self._times, begin) - 1)
        last = min(len(self._times) - 1, bisect_left(self._times, end))
        return max(0.0, self._waited_s[last] - self._waited_s[first])


@asynccontextmanager
async def sampled(pids: Sequence[int]) -> AsyncIterator[Waits]:
    """Sample their waits for the time of the block, and once more at its end."""
    waits = Waits()
    waits.sample(pids)

    async def go_on() -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            waits.sample(pids)

    sampling = asyncio.create_task(go_on())
    try:
        yield waits
    finally:
        sampling.cancel()
        await asyncio.wait([sampling])


def _waited_s(pids: Sequence[int]) -> float:
    """Return how long the threads that they have now were ready to run and did not, since these began.

    The second number of /proc/PID/task/TID/schedstat, in ns; 0 where the kernel counts none.
    """
    waited_ns = 0
    for pid in pids:
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):  # the thread has ended
                waited_ns += int(file.read_text().split()[1])
    return waited_ns / 1e9
