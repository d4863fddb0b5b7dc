"""Runs jobs that take longer than an instant on the few threads of a lane, and serves teams in turn.

Requests of one team wait behind each other: the teams take turns, and no team has all threads at once. Waiting jobs are
bounded per team and in all, in number, bytes and time. A job whose caller left while it waited never runs.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

from workers.process.limits import give_back_free, started_threads
from workers.protocol.events import CallFailed, Failure, FailureCode

P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneBounds:
    """Bounds on a lane's jobs that wait for a thread (not on running jobs); a job beyond them is refused as BUSY."""

    jobs_per_team: int = 128
    jobs: int = 512
    bytes_per_team: int = 64 << 20
    """Maximum memory of a team's waiting jobs, in bytes, as callers state it (`num_bytes` of `FairLane.run`)."""
    bytes: int = 256 << 20
    wait_s: float = 30.0


FORMS_AT_ONCE = 3
"""Number of threads on which forms (schemas, grammars) are compiled. One team gets at most two of them at a time, so
that others need not wait for its slow forms."""

FORM_STACK_BYTES = 16 << 20
"""Size of the stacks of these threads. It is eight times that of a trial (`workers.llama.sampling.grammar_forks`), in
which a grammar has to compile first if compiling it may need much."""

FEWEST_AT_ONCE, MOST_AT_ONCE = 2, 8

LARGE_BYTES, TIDY_AFTER_S = 128 << 10, 1.0
"""After a job of `LARGE_BYTES` or more, free memory is given back to the system `TIDY_AFTER_S` seconds later."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """One job that waits for a thread."""

    turn: asyncio.Future[None]
    num_bytes: int


@dataclass(slots=True, eq=False)
class _Team:
    """The waiting jobs of one team, in their order."""

    waiting: deque[_Waiting] = field(default_factory=deque)
    num_bytes: int = 0


class FairLane:
    """Runs jobs on threads of its own, and takes the teams in turn. Use it on one event loop."""

    def __init__(self, doing: str, *, at_once: int, bounds: LaneBounds | None = None, stack_bytes: int = 0) -> None:
        """`doing`: what the jobs do, for messages to callers (`tokenising`). `at_once`: number of threads. If there are
        several, a team can't have all of them, so that other teams need not wait for its slowest job. `stack_bytes`:
        size of their stacks; 0: the system's default."""
        self._doing = doing
        self._at_once = at_once
        self._per_team = max(1, at_once - 1)
        self._bounds = bounds or LaneBounds()
        self._threads = started_threads(f"paddock-{doing}", at_once, stack_bytes=stack_bytes)
        self._running: Counter[str] = Counter()
        self._num_running = 0
        self._line: dict[str, _Team] = {}
        """Teams with waiting jobs; the team that is served next comes first."""
        self._num_waiting = self._num_bytes = 0
        self._tidying: asyncio.TimerHandle | None = None

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    async def run(
        self, team: str, num_bytes: int, work: Callable[P, Result], *args: P.args, **named: P.kwargs
    ) -> Result:
        """Run `work` on a thread; return its result or raise its error. Cancelling drops a job that still waits; a
        running job keeps its thread until it ends.

        `num_bytes`: memory that the job keeps while it waits. Raises CallFailed (BUSY): at once if too much waits
        already, or after `wait_s` without a free thread."""
        await self._turn(team, num_bytes)
        context = contextvars.copy_context()
        try:
            job = asyncio.get_running_loop().run_in_executor(self._threads, partial(context.run, work, *args, **named))
        except RuntimeError:  # the lane is closed
            self._free(team)
            raise
        job.add_done_callback(lambda done: self._leave(team, done))
        try:
            # Cancelling the future itself would count the thread as free while it still works.
            return await asyncio.shield(job)
        finally:
            # An error refers to this frame, and the job to the error. If the frame kept the job, the request would stay
            # in memory until the cycle collector runs.
            del job
            if num_bytes >= LARGE_BYTES and self._tidying is None:
                self._tidying = asyncio.get_running_loop().call_later(TIDY_AFTER_S, self._tidy)

    def _tidy(self) -> None:
        self._tidying = None
        self._threads.submit(give_back_free)

    def close(self) -> None:
        """End the threads as soon as their jobs end."""
        if self._tidying is not None:
            self._tidying.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, team: str, num_bytes: int) -> None:
        """Wait until the team may have a thread, and count the thread as taken. Raises CallFailed."""
        if self._num_running < self._at_once and team not in self._line and self._running[team] < self._per_team:
            self._enter(team)
            return
        self._check(team, num_bytes)
        waiting = _Waiting(asyncio.get_running_loop().create_future(), num_bytes)
        self._join(team, waiting)
        try:
            async with asyncio.timeout(self._bounds.wait_s):
                await waiting.turn
        except TimeoutError:
            self._give_up(team, waiting)
            raise _busy(f"{self._doing} did not get its turn on this worker within {self._bounds.wait_s:g} s") from None
        except asyncio.CancelledError:
            self._give_up(team, waiting)
            raise

    def _check(self, team: str, num_bytes: int) -> None:
        """Raise CallFailed if so much waits already that this job may not wait as well."""
        bounds, own = self._bounds, self._line.get(team) or _Team()
        if len(own.waiting) >= bounds.jobs_per_team:
            raise _busy(f"{bounds.jobs_per_team} requests of your team wait for {self._doing} on this worker already")
        if own.waiting and own.num_bytes + num_bytes > bounds.bytes_per_team:
            size = f"{bounds.bytes_per_team >> 20} MiB"
            raise _busy(f"requests of your team with {size} wait for {self._doing} on this worker already")
        if self._num_waiting >= bounds.jobs or (self._num_waiting and self._num_bytes + num_bytes > bounds.bytes):
            raise _busy(
                f"{self._num_waiting} requests wait for {self._doing} on this worker; "
                f"at most {bounds.jobs}, and {bounds.bytes >> 20} MiB, may"
            )

    def _join(self, team: str, waiting: _Waiting) -> None:
        own = self._line.setdefault(team, _Team())
        own.waiting.append(waiting)
        own.num_bytes += waiting.num_bytes
        self._num_waiting += 1
        self._num_bytes += waiting.num_bytes

    def _give_up(self, team: str, waiting: _Waiting) -> None:
        """Drop a job whose caller left or has waited for too long."""
        if waiting.turn.done() and not waiting.turn.cancelled():
            self._free(team)  # its turn came at the same moment
            return
        self._remove(team, waiting)

    def _remove(self, team: str, waiting: _Waiting) -> None:
        own = self._line.get(team)
        if own is None or waiting not in own.waiting:
            return  # `_free` took it out already, at the moment in which its caller left
        own.waiting.remove(waiting)
        own.num_bytes -= waiting.num_bytes
        self._num_waiting -= 1
        self._num_bytes -= waiting.num_bytes
        if not own.waiting:
            del self._line[team]

    def _enter(self, team: str) -> None:
        self._running[team] += 1
        self._num_running += 1

    def _leave(self, team: str, job: asyncio.Future[Result]) -> None:
        if not job.cancelled():
            job.exception()  # marks it as seen: its caller may be gone
        self._free(team)

    def _free(self, team: str) -> None:
        """Count the team's thread as free, and give free threads to the waiting teams in turn."""
        self._num_running -= 1
        self._running[team] -= 1
        if not self._running[team]:
            del self._running[team]
        while self._num_running < self._at_once:
            team_next = next((one for one in self._line if self._running[one] < self._per_team), None)
            if team_next is None:
                return
            own = self._line[team_next]
            waiting = own.waiting[0]
            self._remove(team_next, waiting)
            if own.waiting:  # its next turn comes after everybody else's
                self._line[team_next] = self._line.pop(team_next)
            if not waiting.turn.done():
                self._enter(team_next)
                waiting.turn.set_result(None)


def prompts_at_once() -> int:
    """Return how many prompts a worker makes at a time: one per two cores, from `FEWEST_AT_ONCE` to `MOST_AT_ONCE`.

    A worker has as many processes that render templates, and as many that tokenise long texts."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_AT_ONCE, max(FEWEST_AT_ONCE, cores // 2))


def prompt_lane() -> FairLane:
    """Return the lane in which a worker makes prompts: renders templates and tokenises."""
    return FairLane("tokenising", at_once=prompts_at_once())


MEDIA_AT_ONCE = 2
"""Number of threads on which pictures and sounds are read, each of which waits for a helper process most of its time
(`workers.media.decoder`). They are read one by one, and teams take turns with each."""


def media_lane() -> FairLane:
    """Return the lane in which a worker reads pictures and sounds."""
    return FairLane("reading its pictures or sounds", at_once=MEDIA_AT_ONCE)


def form_lane() -> FairLane:
    """Return the lane in which a worker compiles forms, and makes samplers that take longer than an instant."""
    return FairLane("making its form or sampler", at_once=FORMS_AT_ONCE, stack_bytes=FORM_STACK_BYTES)


def _busy(message: str) -> CallFailed:
    return CallFailed(Failure(FailureCode.BUSY, f"{message}; send fewer at once, or ask again in a moment"))
