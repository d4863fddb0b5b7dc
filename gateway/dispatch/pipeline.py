"""Takes a call to its answer: enforces limits, counts the call while it is under way, and cuts it off in time.

call = resolver.resolve(...)                        who asks for what, until when (`CallResolver`)
async with pipeline.answer(call, request, answer_log) as answer:
    while not answer.ended:
        events = await answer.take()                a list of events; leaving the block cancels the call
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from dataclasses import replace as replace_call
from functools import partial

from msgspec.structs import replace

from gateway.adapters.choice import CallAdapters
from gateway.back_pressure import stopped
from gateway.call import FREE, Answer, Call, Cutoff
from gateway.dispatch.call_state import Limits
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.upstream import HoldVectors
from gateway.limits.limiter import RateLimits
from gateway.telemetry.answer_log import AnswerLog
from gateway.telemetry.prompts import UNWRITTEN, Heard, Prompts
from gateway.telemetry.request_log import RequestLog
from workers.protocol.pooled import PoolRequest, PoolResult
from workers.protocol.requests import GenerateRequest


@dataclass(frozen=True, slots=True)
class CallUnderWay:
    """A call of this gateway whose answer is not complete."""

    call: Call
    """As it came: a call that fell back has its present model in `answer_log`."""
    priority: int
    """As workers have it: higher goes first."""
    answer_log: AnswerLog
    cutoff: Cutoff


class Pipeline:
    """Runs the calls of this gateway process, each to the end of its answer."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        adapters: CallAdapters,
        limits: Limits,
        prompts: Prompts = UNWRITTEN,
        rate_limits: RateLimits | None = None,
    ) -> None:
        """`rate_limits`: None: no call is limited."""
        self._dispatcher = dispatcher
        self._rate_limits = rate_limits
        self.adapters = adapters
        self._prompts = prompts
        self._limits = limits
        self._under_way: dict[Cutoff, CallUnderWay] = {}

    @property
    def num_calls(self) -> int:
        return len(self._under_way)

    def cut_all(self) -> None:
        """End every call under way with an error that is sent to its client."""
        for cutoff in self._under_way:
            cutoff.cut(stopped())

    def calls(self) -> list[CallUnderWay]:
        """Return the calls under way, the first that came first. Each of the answers to a request is one."""
        return list(self._under_way.values())

    async def permit_ahead(
        self, call: Call, asked: Sequence[GenerateRequest], request_log: RequestLog
    ) -> tuple[Call, Callable[[], None]]:
        """Return the permitted call, for one that is answered before it is computed, and what must be called when the
        call is over. Raises RateLimited, StoreUnavailable."""
        reservation = None if self._rate_limits is None else self._rate_limits.reserve(call, asked, request_log)
        if self._rate_limits is None or reservation is None:
            return call, _end_nothing
        end = partial(self._rate_limits.end, reservation)
        try:
            await reservation.granted()
        except BaseException:
            end()
            raise
        return replace_call(call, permit=reservation), end

    @asynccontextmanager
    async def permitted(
        self, call: Call, asked: Sequence[GenerateRequest] | PoolRequest, request_log: RequestLog
    ) -> AsyncIterator[Call]:
        """Yield the call with its permit, for all answers to one request; the block is the time in which it counts as
        under way. A call that has a permit keeps it. Raises RateLimited, StoreUnavailable."""
        if self._rate_limits is None or call.permit is not FREE:
            yield call
            return
        async with self._rate_limits.permit(call, asked, request_log) as permit:
            yield call if permit is FREE else replace_call(call, permit=permit)

    @asynccontextmanager
    async def answer(self, call: Call, request: GenerateRequest, answer_log: AnswerLog) -> AsyncIterator[Answer]:
        """Place the call, retry it on other workers as long as that is safe, and yield its answer once it has begun.

        Raises PaddockError: no slot in time, refused by the worker, failed, cut off."""
        request = _bounded(request, call, answer_log)
        with self._counted(call, request, answer_log) as (cutoff, heard):
            async with cutoff, self._dispatcher.answer(call, request, answer_log, cutoff) as answer:
                yield heard.of(answer)

    async def pool(self, call: Call, request: PoolRequest, answer_log: AnswerLog, hold: HoldVectors) -> PoolResult:
        """Return the result of pooled work, which is placed and retried like any call.

        `hold` counts the memory of the vectors. Raises PaddockError, and what `hold` raises."""
        with self._counted(call, request, answer_log) as (cutoff, _):
            async with cutoff:
                return await self._dispatcher.pool(call, request, answer_log, hold)

    @contextmanager
    def _counted(
        self, call: Call, request: GenerateRequest | PoolRequest, answer_log: AnswerLog
    ) -> Iterator[tuple[Cutoff, Heard]]:
        """Count a call as under way during the block. Yield its `Cutoff`, and the `Heard` that logs its prompt."""
        limit = f"the limit of {self._limits.request_timeout_s:g} s for one request"
        cutoff, heard = Cutoff(call.deadline, limit), self._prompts.begins(call, answer_log, request)
        priority = 0 if isinstance(request, PoolRequest) else request.priority
        self._under_way[cutoff] = CallUnderWay(call, priority, answer_log, cutoff)
        call.permit.watch(cutoff.cut)
        try:
            yield cutoff, heard
        finally:
            call.permit.unwatch(cutoff.cut)
            del self._under_way[cutoff]
            heard.ends()


def _end_nothing() -> None:
    """Do nothing at the end of a call without limits."""


def _bounded(request: GenerateRequest, call: Call, answer_log: AnswerLog) -> GenerateRequest:
    """Return the request, with priority and `max_tokens` lowered to the limits of the caller's key and of the alias.

    A priority above the limit is lowered, not refused: clients send the same priority to every server, and a late
    answer is better than none. The answer's header `x-paddock-priority` then shows the lowered priority."""
    bounds = call.principal.bounds
    most_urgent = -bounds.min_priority
    if request.priority > most_urgent:
        answer_log.priority = bounds.min_priority
        request = replace(request, priority=most_urgent)
    for most in (bounds.max_tokens, call.permit.max_tokens):
        if most is not None and (request.max_tokens is None or request.max_tokens > most):
            request = replace(request, max_tokens=most)
    return request
