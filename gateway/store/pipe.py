"""Script calls of one gateway process, in order, over one connection; what is asked meanwhile joins the next batch.

Under load many calls share one round trip (a script call costs a third as much). The order makes giving up safe: a
withdrawal that is sent after an acquisition runs after it, even if nobody waits for the acquisition's answer any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    MasterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
    TryAgainError,
)

from gateway.errors import StoreUnavailable
from gateway.store.scripts import Script

log = logging.getLogger(__name__)

MAX_BATCH = 256

AWAY = (
    OSError,
    ConnectionError,
    TimeoutError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    TryAgainError,
)
"""What a Redis that is away, starting, full or being replaced answers with."""


LOG_EVERY_S = 10.0
"""How often at most the log says why Redis does not take requests."""


def unavailable(error: BaseException) -> StoreUnavailable:
    """What callers get to read; the client's own words have addresses in them, so they stay in the log."""
    told = StoreUnavailable("This gateway's store does not answer. Send the request again.", retry_after_s=1.0)
    told.__cause__ = error
    return told


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    script: Script
    arguments: tuple[str | int, ...]
    answer: asyncio.Future[Any]


class Pipe:
    """Runs scripts in the order they were asked for. One event loop; the sending task lives while there is work.

    A batch has `timeout_s`, connecting included: a caller waits for at most two of them when Redis hangs.
    """

    def __init__(self, redis: redis.asyncio.Redis, scripts: Sequence[Script], timeout_s: float) -> None:
        self._redis = redis
        self._scripts = scripts
        self._timeout_s = timeout_s
        self._loaded = False
        self._jobs: list[_Job] = []
        self._sender: asyncio.Task[None] | None = None
        self._logged_at = float("-inf")

    def send(self, script: Script, prefix: str, *arguments: str | int) -> asyncio.Future[Any]:
        """Asks without waiting. The script runs whether or not anybody awaits the answer, which may fail with
        StoreUnavailable, or redis.ResponseError if the script itself is at fault."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._jobs.append(_Job(script, (script.sha, 1, prefix, *arguments), answer))
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_all(), name="redis scripts")
        return answer

    def post(self, script: Script, prefix: str, *arguments: str | int) -> None:
        """Asks and forgets; a failure is logged."""
        self.send(script, prefix, *arguments).add_done_callback(_log_failure)

    async def close(self) -> None:
        """Waits until everything asked for has run or failed."""
        while self._sender is not None:
            await asyncio.wait({self._sender})

    async def _send_all(self) -> None:
        try:
            while self._jobs:
                batch, self._jobs = self._jobs[:MAX_BATCH], self._jobs[MAX_BATCH:]
                await self._run(batch)
        finally:
            self._sender = None
            for job in self._jobs:
                job.answer.cancel()
            self._jobs = []

    async def _run(self, batch: list[_Job]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                answers = await self._answers(batch)
        except (RedisError, OSError) as error:  # TimeoutError is one of the latter
            answers = [error] * len(batch)
        except asyncio.CancelledError:
            for job in batch:
                job.answer.cancel()
            raise
        for job, answer in zip(batch, answers, strict=True):
            if isinstance(answer, AWAY):
                self._log_why(answer)
            _settle(job, answer)

    def _log_why(self, error: BaseException) -> None:
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            what = str(error) or "no answer in time"
            log.warning("no requests to Redis (%s: %s); check PADDOCK_REDIS_URL", type(error).__name__, what)

    async def _answers(self, batch: list[_Job]) -> list[Any]:
        if not self._loaded:
            await self._load()
        answers = await self._execute(batch)
        unknown = [job for job, answer in zip(batch, answers, strict=True) if isinstance(answer, NoScriptError)]
        if not unknown:
            return answers
        await self._load()
        again = dict(zip(unknown, await self._execute(unknown), strict=True))
        return [again.get(job, answer) for job, answer in zip(batch, answers, strict=True)]

    async def _execute(self, batch: list[_Job]) -> list[Any]:
        """One answer or exception per job; raises if the connection fails."""
        if len(batch) == 1:
            try:
                sha, _, *rest = batch[0].arguments
                return [await self._redis.evalsha(str(sha), 1, *rest)]
            except NoScriptError as error:
                return [error]
        async with self._redis.pipeline(transaction=False) as pipeline:
            for job in batch:
                pipeline.execute_command("EVALSHA", *job.arguments)
            return await pipeline.execute(raise_on_error=False)

    async def _load(self) -> None:
        """All at once: a batch of which Redis knew some scripts only would be run out of order."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for script in self._scripts:
                pipeline.script_load(script.source)
            await pipeline.execute()
        self._loaded = True


def _settle(job: _Job, answer: Any) -> None:
    if job.answer.done():  # whoever asked has given up
        return
    if isinstance(answer, AWAY):
        job.answer.set_exception(unavailable(answer))
    elif isinstance(answer, BaseException):
        job.answer.set_exception(answer)
    else:
        job.answer.set_result(answer)


def _log_failure(answer: asyncio.Future[Any]) -> None:
    if not answer.cancelled() and (error := answer.exception()) is not None:
        log.warning("a slot could not be given back, it comes free when its lease expires: %s", error)
