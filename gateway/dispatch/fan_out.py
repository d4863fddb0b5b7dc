"""Generates several answers to one request at the same time: each is placed and retried by itself.

Answers to one prompt share its prefill where they meet on a worker (docs/engine.md).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from gateway.call import Answer, Call
from gateway.dispatch.pipeline import Pipeline
from gateway.dispatch.request_size import chars_of
from gateway.dispatch.upstream import error_for
from gateway.errors import PaddockError
from gateway.telemetry.request_log import RequestLog
from workers.protocol.events import NO_USAGE, CallEvent, Failed, Finished, Usage
from workers.protocol.requests import GenerateRequest

MAX_AT_ONCE = 32
"""Answers to one request that are asked for at once; further ones follow as these end."""
LONG_CHARS = 256 << 10
LONG_PACE_S = 0.05
"""Prompts over LONG_CHARS are hashed and encoded for each answer, so the answers to one begin LONG_PACE_S apart."""


@asynccontextmanager
async def start_answers(
    pipeline: Pipeline, call: Call, requests: Sequence[GenerateRequest], request_log: RequestLog
) -> AsyncIterator[Answer]:
    """Start the answers; the block begins when the first of them has, and leaving it cancels what is left.

    Raises PaddockError, as `Pipeline.answer`; where one of several fails, none is complete.
    """
    # A task group's frame refers to the error that it raises, and the error to the frame, and so to all requests: a
    # hundred of them, left many times, were 200,000 objects for the collector of cycles. So tracebacks are cut here.
    if len(requests) == 1:
        async with pipeline.answer(call, requests[0], request_log.answer) as answer:
            yield answer
        return
    merged = MergedAnswers(pipeline, call, requests, request_log)
    branches: list[asyncio.Task[None]] = []
    failure: PaddockError | None = None
    is_long: dict[tuple[int, ...], bool] = {}
    try:
        async with asyncio.TaskGroup() as tasks:
            try:
                for number, request in enumerate(requests[:MAX_AT_ONCE]):
                    # Each prompt is measured once, for all of its answers; the loop gets a turn between two prompts.
                    prompt = (id(request.prompt), id(request.messages), id(request.infill))
                    if number and prompt not in is_long:
                        is_long[prompt] = chars_of(request) > LONG_CHARS
                        if not isinstance(request.prompt, str):
                            await asyncio.sleep(0)
                    wait_s = number * LONG_PACE_S if number and is_long[prompt] else 0.0
                    branches.append(tasks.create_task(merged.follow(number, wait_s)))
                await merged.begun.wait()
                yield merged
            finally:
                await _cancel(branches)
    except BaseExceptionGroup as group:
        # All branches ask for the same; the first failure stands for those that it brought with it.
        failure = _failure_of(group)
        if failure is None:
            raise
        group.__traceback__ = None
    except asyncio.CancelledError as cancelled:
        cancelled.__traceback__ = None
        raise
    if failure is not None:
        try:
            raise failure
        finally:
            del failure, branches, tasks


async def _cancel(branches: Sequence[asyncio.Task[None]]) -> None:
    """Cancel what is under way, one in a turn of the loop.

    The callers of twenty requests with a hundred prompts each left, and ending all at once kept the loop for 120 ms.
    """
    for branch in branches:
        if not branch.done():
            branch.cancel()
            await asyncio.sleep(0)


class MergedAnswers:
    """Merges the events of several answers in the order in which they come. A slow reader holds the answers up."""

    def __init__(
        self, pipeline: Pipeline, call: Call, requests: Sequence[GenerateRequest], request_log: RequestLog
    ) -> None:
        self.begun = asyncio.Event()
        """Set when one of the answers has begun."""
        self.choice = 0
        self.end: Finished | Failed | None = None
        self._pipeline, self._call, self._requests, self._request_log = pipeline, call, requests, request_log
        self._logs = request_log.split(len(requests))
        self._num_left = len(requests)
        self._further = iter(range(MAX_AT_ONCE, len(requests)))
        """Answers that no task follows yet: a task for each would be thousands of objects that wait."""
        self._arrived: asyncio.Queue[tuple[int, list[CallEvent]]] = asyncio.Queue(maxsize=len(requests))

    @property
    def ended(self) -> bool:
        return self._num_left == 0

    async def take(self) -> list[CallEvent]:
        self.choice, events = await self._arrived.get()
        last = events[-1]
        self.end = last if isinstance(last, Finished) else None
        self._num_left -= self.end is not None
        return events

    async def follow(self, number: int, wait_s: float) -> None:
        """Pass on one answer's events, begun in `wait_s`, then those of answers not begun yet. Raises PaddockError."""
        if wait_s:
            await asyncio.sleep(wait_s)
        await self._follow_one(number)
        for another in self._further:
            await self._follow_one(another)

    async def _follow_one(self, number: int) -> None:
        call, log = _call_of_answer(self._call, number), self._logs[number]
        async with self._pipeline.answer(call, self._requests[number], log) as answer:
            if not self.begun.is_set():
                self._request_log.answer = log
                self.begun.set()
            await self._pass_on(number, answer)

    async def _pass_on(self, number: int, answer: Answer) -> None:
        while not answer.ended:
            events = await answer.take()
            if isinstance(answer.end, Failed):
                raise error_for(answer.end.failure)
            await self._arrived.put((number, events))


def _call_of_answer(call: Call, number: int) -> Call:
    """Return the call of answer `number`; if that waited for earlier answers, its wait for a slot begins now."""
    if number < MAX_AT_ONCE:
        return call
    began = call.received_at
    queue_s, start_s = call.queue_deadline - began, (call.start_deadline or call.queue_deadline) - began
    return call.waiting(time.monotonic(), queue_s=queue_s, start_s=start_s)


def _failure_of(group: BaseExceptionGroup[BaseException]) -> PaddockError | None:
    """Return the first failure; None where one of them is not an error that callers are shown."""
    failures, others = group.split(PaddockError)
    return None if failures is None or others is not None else _first_error(failures)


def _first_error(group: BaseExceptionGroup[PaddockError]) -> PaddockError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, PaddockError):
        raise error
    return error


def usage_of(ends: Sequence[Finished], num_prompts: int) -> Usage:
    """Return the usage of all answers together; `ends` in the order of the requests, equally many for each prompt.

    A prompt counts once, however many answers there are to it.
    """
    per_prompt = len(ends) // num_prompts
    total = NO_USAGE
    for number, end in enumerate(ends):
        total += end.usage.of_answer if number % per_prompt else end.usage
    return total
