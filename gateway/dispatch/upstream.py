"""The port to the servers that compute calls (`Upstream`). `gateway.relay` implements it for workers.

async with upstream.start(at, call, request, ...) as answer:    start
    await answer.peek(), await answer.take()                    events
                                                                leaving the block cancels an unfinished call
on_end(end)                                                     called with the last event as soon as it comes
await upstream.pool(at, call, request)                          pooled work: one question, one result
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from gateway.call import Answer, Call
from gateway.errors import (
    ContextOverflow,
    InternalError,
    InvalidRequest,
    OutOfMemory,
    PaddockError,
    QueueFull,
    StorageFull,
    Unavailable,
    UnsupportedParameter,
    WorkerLost,
)
from workers.protocol.events import CallEvent, Failed, Failure, FailureCode, Finished
from workers.protocol.heartbeat import WorkerAddress
from workers.protocol.pooled import PoolRequest, PoolResult
from workers.protocol.requests import GenerateRequest
from workers.tracing.span import TraceContext

HoldVectors = Callable[[int, int], None]
"""Counts the memory of an answer with at least `num_bytes` of vectors, each of `width` numbers (0: not known), for the
request. Raises PaddockError if that is too much."""


class UpstreamAnswer(Answer, Protocol):
    """The events of a call that was started and whose answer may not have begun yet."""

    async def peek(self, past: type[CallEvent] | tuple[()] = ()) -> CallEvent:
        """Wait for the first event that is not of type `past` (`()`: the first event); return it without taking it.
        It may lack its probabilities."""
        ...

    @property
    def num_unread(self) -> int:
        """Tokens of the answer that have come and were not taken yet. Read once per call, when it is left."""
        ...


class Upstream(Protocol):
    """Has the server at a given address compute a call. Retries nothing: the dispatcher decides about retries."""

    @property
    def any_lost(self) -> bool:
        """Whether `is_lost` is true of any process. Must be cheap, since it is read for every call."""
        ...

    def is_lost(self, boot: str) -> bool:
        """Return whether the process is known to be gone, although the fleet may still list it."""
        ...

    def start(
        self,
        at: WorkerAddress,
        call: Call,
        request: GenerateRequest,
        *,
        on_end: Callable[[Finished | Failed], None],
        on_overflow: Callable[[PaddockError], None],
        context: TraceContext | None,
    ) -> AbstractAsyncContextManager[UpstreamAnswer]:
        """Start a call for the time of the block; leaving it before the call's end cancels the call, without waiting.

        `on_end` is called with the answer's last event when it comes, which can be long before the caller takes it;
        `on_overflow`, when events are dropped, with the error for the caller: they were not read in time, or what is
        not read yet takes too much memory. `context`: the parent span of the call's own spans. Raises CallFailed if the
        address cannot be reached; a refusal can also come as a `Failed` event."""
        ...

    async def pool(
        self,
        at: WorkerAddress,
        call: Call,
        request: PoolRequest,
        context: TraceContext | None,
        hold: Callable[[int], None],
    ) -> PoolResult:
        """Return the result of pooled work; cancelling the await cancels the work. Raises CallFailed.

        `hold` is called with the bytes of the vectors that have come so far; what it raises ends the work."""
        ...


ERRORS: dict[FailureCode, type[PaddockError]] = {
    FailureCode.INVALID_REQUEST: InvalidRequest,
    FailureCode.CONTEXT_OVERFLOW: ContextOverflow,
    FailureCode.UNSUPPORTED: UnsupportedParameter,
    FailureCode.UNAUTHORIZED: InternalError,
    FailureCode.BUSY: QueueFull,
    FailureCode.DRAINING: Unavailable,
    FailureCode.WORKER_LOST: WorkerLost,
    FailureCode.STORAGE_FULL: StorageFull,
    FailureCode.OVERRUN: Unavailable,
    FailureCode.OUT_OF_MEMORY: OutOfMemory,
    FailureCode.UNAVAILABLE: Unavailable,
    FailureCode.INTERNAL: InternalError,
}


def error_for(failure: Failure) -> PaddockError:
    """Return the error that the client gets for a worker's failure."""
    if failure.code is FailureCode.UNAUTHORIZED:
        # The client's key is valid; the operator has to act.
        return InternalError(
            "The worker refused this gateway's secret. Start both with the same PADDOCK_WORKER_SECRET."
        )
    if failure.code is FailureCode.CONTEXT_OVERFLOW:
        numbers = {"num_prompt_tokens": failure.num_prompt_tokens, "n_ctx": failure.n_ctx}
        return ContextOverflow(failure.remedy or failure.message, param=failure.param, **numbers)
    return ERRORS[failure.code](failure.message, param=failure.param)
