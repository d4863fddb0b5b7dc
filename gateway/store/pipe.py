"""Sends one gateway process's script calls in order, in batches: calls during a round trip go with the next one.

Under load many calls share one round trip (a script call costs a third as much). The order makes giving up safe: a
withdrawal that is sent after an acquisition runs after it, even if no task waits for the acquisition's answer any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio

from gateway.errors import StoreUnavailable
from gateway.store.runner import MENDABLE, Call, runner_for
from gateway.store.scripts import Script
from gateway.store.trouble import NO_ANSWER, remedy_for, unavailable

log = logging.getLogger(__name__)

MAX_BATCH = 256

MENDS = 3
"""Most retries of a batch, each after the cause has been repaired."""

LOG_EVERY_S = 10.0
"""Least seconds between two log lines about why Redis does not take requests."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    call: Call
    answer: asyncio.Future[Any]
    script: str
    asked_at: float
    """time.perf_counter() when the call was made."""


@dataclass(slots=True, eq=False)
class _Lane:
    jobs: list[_Job] = field(default_factory=list)
    sender: asyncio.Task[None] | None = None


class Pipe:
    """Runs scripts in the order in which they were called. For one event loop; sending tasks live while there is work.

    A batch has `timeout_s`, connecting included: a caller waits for at most two of them when Redis hangs. On a Cluster
    each key prefix has a queue (lane) of its own, so that a server that is away holds up its own models only.
    """

    def __init__(
        self,
        redis: redis.asyncio.Redis,
        scripts: Sequence[Script],
        timeout_s: float,
        took: Callable[[float, str], None] | None = None,
    ) -> None:
        """`took` is called for each answer with the seconds that it took and the script's name."""
        self._runner = runner_for(redis, scripts)
        self._timeout_s = timeout_s
        self._lanes: dict[str, _Lane] = {}
        self._took = took
        self._logged_at = float("-inf")

    def send(self, script: Script, prefix: str, *arguments: str | int | bytes) -> asyncio.Future[Any]:
        """Queue a script call and return its answer as a future. The script runs whether or not that is awaited. It
        fails with StoreUnavailable and nothing else: whatever a script meets in our keys is no fault of the caller."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        name = self._runner.lane(prefix)
        lane = self._lanes.setdefault(name, _Lane())
        lane.jobs.append(_Job((script.sha, 1, prefix, *arguments), answer, script.name, time.perf_counter()))
        if lane.sender is None:
            lane.sender = asyncio.create_task(self._send_all(name, lane), name="redis scripts")
        return answer

    def post(self, lost: Callable[[], None], script: Script, prefix: str, *arguments: str | int | bytes) -> None:
        """Queue a script call without an answer; `lost` is called if it fails."""

        def done(answer: asyncio.Future[Any]) -> None:
            if not answer.cancelled() and isinstance(answer.exception(), StoreUnavailable):
                lost()

        self.send(script, prefix, *arguments).add_done_callback(done)

    async def close(self) -> None:
        """Wait until every call has run or failed."""
        while senders := {lane.sender for lane in self._lanes.values() if lane.sender is not None}:
            await asyncio.wait(senders)

    async def _send_all(self, name: str, lane: _Lane) -> None:
        try:
            while lane.jobs:
                batch, lane.jobs = lane.jobs[:MAX_BATCH], lane.jobs[MAX_BATCH:]
                await self._run(batch)
        finally:
            del self._lanes[name]
            for job in lane.jobs:
                job.answer.cancel()

    async def _run(self, batch: list[_Job]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                answers = await self._answers([job.call for job in batch])
        except NO_ANSWER as error:
            answers = [error] * len(batch)
        except asyncio.CancelledError:
            for job in batch:
                job.answer.cancel()
            raise
        self._note_time(batch)
        for job, answer in zip(batch, answers, strict=True):
            if isinstance(answer, BaseException):
                self._log_why(answer, job)
            _settle(job, answer)

    def _note_time(self, batch: list[_Job]) -> None:
        if self._took is None:
            return
        now = time.perf_counter()
        for job in batch:
            self._took(now - job.asked_at, job.script)

    def _log_why(self, error: BaseException, job: _Job) -> None:
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            what = str(error) or "no answer in time"
            told = (job.script, job.call[2], type(error).__name__, what, remedy_for(error))
            log.warning("Redis does not run the script %s for %s (%s: %s): %s", *told)

    async def _answers(self, calls: list[Call]) -> list[Any]:
        """Run calls in order. After repairing why one could not be run, run it and all after it again, some twice."""
        answers = await self._runner.run(calls)
        for _ in range(MENDS):
            ill = next((at for at, answer in enumerate(answers) if isinstance(answer, MENDABLE)), None)
            if ill is None:
                break
            await self._runner.mend(calls[ill], answers[ill])
            answers[ill:] = await self._runner.run(calls[ill:])
        return answers


def _settle(job: _Job, answer: Any) -> None:
    if job.answer.done():  # the caller has given up
        return
    if isinstance(answer, BaseException):
        job.answer.set_exception(unavailable(answer))
    else:
        job.answer.set_result(answer)
