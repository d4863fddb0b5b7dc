"""Runs work on large bodies, one piece of work at a time; the teams that wait are served in turn.

Work that is one long call (a job) runs on a thread, which shares the interpreter with the event loop. Work that can be
cut into slices runs on the loop itself, one slice at a time. However many bodies come, there is a rest after each job
before the next one: as long as the job took, LONGEST_REST_S at most. Slices have such rests, too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from time import monotonic, sleep, thread_time
from typing import TypeVar

from gateway.dispatch.team_turns import TeamTurns
from workers.process.limits import give_back_free, started_threads

INLINE_BYTES = 256 << 10
INLINE_STRINGS, INLINE_NUMBERS = 2_000, 8_000
"""A body within INLINE_BYTES, INLINE_STRINGS and INLINE_NUMBERS is decoded on the event loop, in 1 or 2 ms."""
LEAST_REST_S = 0.001
"""Minimum seconds of a rest: timers are no finer. A shorter rest is added to the next."""
LONGEST_REST_S = 0.25
REST_AFTER_S = 0.002
"""Seconds of CPU time after which a job rests, so that the event loop can run."""
TIDY_AFTER_S = 1.0

ResultT = TypeVar("ResultT")


class _Job(threading.local):
    """The state of a thread's job; each thread has its own. Only the decoding thread ever has a job under way."""

    is_under_way = False
    since_s = 0.0
    """time.thread_time() when the job last let the loop run."""
    rested_s = 0.0
    """Seconds that the job has rested so far."""


_job = _Job()


def let_loop_run() -> None:
    """Rest for as long as the decoding thread has computed since its last rest; on any other thread, do nothing.

    Call this between parts of a body. The event loop waits for the GIL at each event, and before the next event the
    decoding thread takes it back: without rests, a stream stood still for 200 ms while a body took 80 ms to decode."""
    if _job.is_under_way and (took_s := thread_time() - _job.since_s) > REST_AFTER_S:
        sleep(took_s)
        _job.rested_s += took_s
        _job.since_s = thread_time()


class DecodingThread:
    """Runs work on one thread, or in slices on the event loop. For either, teams that wait are served in turn."""

    def __init__(self) -> None:
        self._thread = started_threads("decoding", 1)
        self._jobs, self._slices = _Resting(), _Resting()
        self._tidying: asyncio.TimerHandle | None = None
        self._rested_s = 0.0
        """Seconds that the last job rested while it was under way."""

    async def run(self, team: str, work: Callable[[], ResultT]) -> ResultT:
        """Run `work` on the thread and return its result. `work` must not touch anything that the loop may change."""
        await self._jobs.take(team)
        loop, began = asyncio.get_running_loop(), monotonic()
        job = loop.run_in_executor(self._thread, self._do, work)
        try:
            # A job that has begun goes on if its caller is cancelled, and the next one waits for it.
            return await asyncio.shield(job)
        finally:
            job.add_done_callback(lambda _: self._jobs.give_back(team, monotonic() - began - self._rested_s))
            # The job refers to its error, and that to this frame: kept here, they would leave a body to the GC.
            del job, work

    async def slice(self, team: str, work: Callable[[], ResultT]) -> ResultT:
        """Run a slice of work, a millisecond or so, on the event loop itself. Return its result; raises what it
        raises."""
        await self._slices.take(team)
        began = monotonic()
        try:
            return work()
        finally:
            self._slices.give_back(team, monotonic() - began)

    def _do(self, work: Callable[[], ResultT]) -> ResultT:
        """Run a job. Called on the decoding thread."""
        _job.is_under_way, _job.since_s, _job.rested_s = True, thread_time(), 0.0
        try:
            return work()
        finally:
            _job.is_under_way, self._rested_s = False, _job.rested_s

    def tidy(self) -> None:
        """Give free memory back to the system after TIDY_AFTER_S. Calls made until then have no further effect."""
        if self._tidying is None:
            self._tidying = asyncio.get_running_loop().call_later(TIDY_AFTER_S, self._tidy)

    def _tidy(self) -> None:
        self._tidying = None
        self._thread.submit(give_back_free)


class _Resting:
    """Lets callers work in turn, one at a time. After each turn comes a rest as long, LONGEST_REST_S at most."""

    def __init__(self) -> None:
        self._turns = TeamTurns()
        self._owed_s = 0.0
        """Seconds of rest that are due for the turns so far, and not yet taken."""

    async def take(self, team: str) -> None:
        """Wait for a turn."""
        await self._turns.take(team)

    def give_back(self, team: str, took_s: float) -> None:
        """End a turn. The next begins after the rest due; if that is below LEAST_REST_S, when the loop runs next."""
        loop = asyncio.get_running_loop()
        self._owed_s += took_s
        if self._owed_s < LEAST_REST_S:
            loop.call_soon(self._turns.give_back, team)
            return
        rest_s, self._owed_s = min(self._owed_s, LONGEST_REST_S), 0.0
        loop.call_later(rest_s, self._turns.give_back, team)
