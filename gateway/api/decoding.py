"""Runs work on large bodies: one at a time, the teams that wait taking turns.

Work that is one long call goes to a thread, which shares the interpreter with the loop. Work that can be done in slices
is done on the loop, one slice in a turn. Both rest as long as they worked, however many bodies come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TypeVar

from gateway.team_turns import TeamTurns
from workers.heap import give_back_free

INLINE_BYTES = 256 << 10
INLINE_STRINGS, INLINE_NUMBERS = 2_000, 8_000
"""Bounds up to which decoding a body takes a millisecond or two."""
LEAST_REST_S = 0.001
"""Shortest rest: timers are no finer. A shorter one is added to the next."""
LONGEST_REST_S = 0.25
TIDY_AFTER_S = 1.0

ResultT = TypeVar("ResultT")


class DecodingLane:
    """Runs work on one thread, or in slices on the event loop. Teams wait in turn for either."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "decoding")
        self._jobs, self._slices = _Resting(), _Resting()
        self._tidying: asyncio.TimerHandle | None = None

    async def run(self, team: str, work: Callable[[], ResultT]) -> ResultT:
        """Return what `work` returns; raises what it raises. It must not touch what the loop may change."""
        await self._jobs.take(team)
        loop, began = asyncio.get_running_loop(), monotonic()
        job = loop.run_in_executor(self._thread, work)
        try:
            # A job that has begun goes on when its caller leaves, and the next one waits for it.
            return await asyncio.shield(job)
        finally:
            job.add_done_callback(lambda _: self._jobs.give_back(team, monotonic() - began))
            # An error refers to this frame, and the job to the error: kept here, it would leave a body to the GC.
            del job, work

    async def slice(self, team: str, work: Callable[[], None]) -> None:
        """Do a slice of work, a millisecond or so, on the loop itself. Raises what it raises."""
        await self._slices.take(team)
        began = monotonic()
        try:
            work()
        finally:
            self._slices.give_back(team, monotonic() - began)

    def tidy(self) -> None:
        """Give free memory back to the system after TIDY_AFTER_S, once for all calls until then."""
        if self._tidying is None:
            self._tidying = asyncio.get_running_loop().call_later(TIDY_AFTER_S, self._tidy)

    def _tidy(self) -> None:
        self._tidying = None
        self._thread.submit(give_back_free)


class _Resting:
    """Turns with a rest between them that is as long as the turn was."""

    def __init__(self) -> None:
        self._turns = TeamTurns()
        self._owed_s = 0.0
        """Seconds of rest that are due for what was done."""

    async def take(self, team: str) -> None:
        """Wait for a turn."""
        await self._turns.take(team)

    def give_back(self, team: str, took_s: float) -> None:
        """Give a turn back after its rest or, where little rest is due, in the loop's next turn."""
        loop = asyncio.get_running_loop()
        self._owed_s += took_s
        if self._owed_s < LEAST_REST_S:
            loop.call_soon(self._turns.give_back, team)
            return
        rest_s, self._owed_s = min(self._owed_s, LONGEST_REST_S), 0.0
        loop.call_later(rest_s, self._turns.give_back, team)
