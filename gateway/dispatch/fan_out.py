"""Generates several answers to one request at the same time: each is placed and retried as a call of its own.

Answers to one prompt that run on the same worker share its prefill (docs/engine.md).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise

from gateway.call import Answer, Call, Push, Pushed
from gateway.dispatch.pipeline import Pipeline
from gateway.dispatch.request_size import chars_of
from gateway.dispatch.upstream import error_for
from gateway.errors import PaddockError
from gateway.telemetry.request_log import RequestLog
from workers.protocol.events import NO_USAGE, CallEvent, Failed, Finished, Usage, num_generated
from workers.protocol.requests import GenerateRequest

MAX_AT_ONCE = 32
"""Maximum number of answers to one request that are generated at once; further ones begin as these end."""
LONG_CHARS = 256 << 10
LONG_PACE_S = 0.05
"""Seconds between the starts of answers to a prompt of over LONG_CHARS characters: each start hashes and encodes it."""


@asynccontextmanager
async def start_answers(
    pipeline: Pipeline, call: Call, requests: Sequence[GenerateRequest], request_log: RequestLog
) -> AsyncIterator[Answer]:
    """Start the answers; the block is entered when the first has begun, and leaving it cancels those not complete.

    Raises PaddockError, as `Pipeline.answer`; if one of several answers fails, the others are cancelled."""
    async with pipeline.permitted(call, requests, request_log) as permitted:
        if len(requests) == 1:
            async with pipeline.answer(permitted, requests[0], request_log.answer) as answer:
                yield answer
            return
        async with _several(pipeline, permitted, requests, request_log) as merged:
            yield merged


@asynccontextmanager
async def _several(
    pipeline: Pipeline, call: Call, requests: Sequence[GenerateRequest], request_log: RequestLog
) -> AsyncIterator[Answer]:
    """Start several answers at once; they are cancelled if one fails."""
    # A task group's frame refers to the error that it raises, and the error to the frame, and so to all requests. Many
    # such calls of a hundred requests, left by their callers, were 200,000 objects for the garbage collector. So
    # tracebacks are cut here.
    merged = MergedAnswers(pipeline, call, requests, request_log)
    branches: list[asyncio.Task[None]] = []
    failure: PaddockError | None = None
    is_long: dict[tuple[int, ...], bool] = {}
    try:
        async with asyncio.TaskGroup() as tasks:
            try:
                for number, request in enumerate(requests[:MAX_AT_ONCE]):
                    # Each prompt is measured once for all its answers; between prompts other tasks get a turn.
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
        # All branches serve the same request: its error is the first failure, which ended the other branches.
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
    """Cancel the tasks that still run, one per turn of the event loop.

    When the callers of 20 requests with 100 prompts each left, cancelling all at once blocked the loop for 120 ms."""
    for branch in branches:
        if not branch.done():
            branch.cancel()
            await asyncio.sleep(0)


class MergedAnswers:
    """Merges the events of several answers in the order in which they come. A slow reader slows the answers down."""

    def __init__(
        self, pipeline: Pipeline, call: Call, requests: Sequence[GenerateRequest], request_log: RequestLog
    ) -> None:
        self.begun = asyncio.Event()
        """Set when one of the answers has begun."""
        self.choice = 0
        self.end: Finished | Failed | None = None
        self._pipeline, self._call, self._requests, self._request_log = pipeline, call, requests, request_log
        self._logs = request_log.split(len(requests))
        self._push: Push | None = None
        self._num_left = len(requests)
        self._further = iter(range(MAX_AT_ONCE, len(requests)))
        """Numbers of the answers that no task follows yet: thousands of tasks that wait would take much memory."""
        self._arrived: asyncio.Queue[tuple[int, list[CallEvent]]] = asyncio.Queue(maxsize=len(requests))

    @property
    def ended(self) -> bool:
        return self._num_left == 0

    async def take(self, push: Push | None = None) -> list[CallEvent]:
        self._push = push
        try:
            self.choice, events = await self._arrived.get()
        finally:
            self._push = None
        self._logs[self.choice].num_queued -= num_generated(events)
        self.end = events[-1] if events and isinstance(events[-1], Finished) else None
        self._num_left -= self.end is not None
        return events

    def _pass_push(self, number: int, events: list[CallEvent]) -> Pushed:
        """Push events of answer `number` to the reader of all answers, if the reader has read all that arrived."""
        if self._push is None or not self._arrived.empty():
            return Pushed.LEFT
        self.choice = number
        pushed = self._push(events)
        if pushed is Pushed.STALLED:
            self._push = None
            self._arrived.put_nowait((number, []))  # wakes the reader
            return Pushed.WRITTEN
        return pushed

    async def follow(self, number: int, wait_s: float) -> None:
        """Run answer `number` after `wait_s`, then answers in `_further`; pass on all events. Raises PaddockError."""
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
        push = partial(self._pass_push, number)
        while not answer.ended:
            events = await answer.take(push)
            if isinstance(answer.end, Failed):
                raise error_for(answer.end.failure)
            self._logs[number].num_queued += num_generated(events)
            await self._arrived.put((number, events))


def _call_of_answer(call: Call, number: int) -> Call:
    """Return the call of answer `number`; if it had to wait for earlier answers, its wait for a slot begins now."""
    if number < MAX_AT_ONCE:
        return call
    began = call.received_at
    queue_s, start_s = call.queue_deadline - began, (call.start_deadline or call.queue_deadline) - began
    return call.waiting(time.monotonic(), queue_s=queue_s, start_s=start_s)


def _failure_of(group: BaseExceptionGroup[BaseException]) -> PaddockError | None:
    """Return the first PaddockError of the group, to show to the caller; None if the group has any other exception."""
    failures, others = group.split(PaddockError)
    return None if failures is None or others is not None else _first_error(failures)


def _first_error(group: BaseExceptionGroup[PaddockError]) -> PaddockError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, PaddockError):
        raise error
    return error


def begin_prompts(requests: Sequence[GenerateRequest]) -> tuple[bool, ...]:
    """Return for each request whether it is the first with its prompt: those of one prompt stand in a row."""
    prompts = [(id(request.prompt), id(request.messages), id(request.infill)) for request in requests]
    return (True, *[one != before for before, one in pairwise(prompts)])


def usage_of(ends: Sequence[Finished], num_prompts: int) -> Usage:
    """Return the usage of all answers together. `ends`: their last events, prompt by prompt, equally many for each.

    A prompt counts once, however many answers it has."""
    per_prompt = len(ends) // num_prompts
    total = NO_USAGE
    for number, end in enumerate(ends):
        total += end.usage.of_answer if number % per_prompt else end.usage
    return total
