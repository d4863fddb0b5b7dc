"""The port to whatever computes calls (`Upstream`). The fan-in of workers, `gateway.relay`, is one implementation.

async with upstream.start(at, call, request, ...) as answer:    start
    await answer.peek(), await answer.take()                    events
                                                                leaving the block cancels what is not over
on_end(end)                                                     the end, as soon as it comes
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


class UpstreamAnswer(Answer, Protocol):
    """The events of a call that was started and may not have begun."""

    async def peek(self, past: type[CallEvent] | tuple[()] = ()) -> CallEvent:
        """Wait for the first event, or the first that is not of the kind `past`, and return it without taking it."""
        ...


class Upstream(Protocol):
    """Computes calls, each at one address. It retries nothing: the dispatcher decides about that."""

    @property
    def any_lost(self) -> bool:
        """Whether `is_lost` is true of any process; cheap, since it is asked for every call."""
        ...

    def is_lost(self, boot: str) -> bool:
        """Return whether the process is known to be gone though the fleet may still show it."""
        ...

    def start(
        self,
        at: WorkerAddress,
        call: Call,
        request: GenerateRequest,
        *,
        on_end: Callable[[Finished | Failed], None],
        on_overflow: Callable[[], None],
        context: TraceContext | None,
        known_bytes: int,
    ) -> AbstractAsyncContextManager[UpstreamAnswer]:
        """Start a call for the time of the block; leaving it before the call's end cancels the call, without waiting.

        `on_end` is called with the answer's last event when it comes, which may be long before the caller takes it;
        `on_overflow` when the caller reads so slowly that events are dropped. `context`: the span that the call's own
        spans lie in. `known_bytes`: size of the conversation, where it has been counted; 0: it has not.
        Raises CallFailed when the address cannot be asked; what refuses the call may also do so in a `Failed` event.
        """
        ...

    async def pool(
        self, at: WorkerAddress, call: Call, request: PoolRequest, context: TraceContext | None
    ) -> PoolResult:
        """Return the result of pooled work; cancelling it cancels the work. Raises CallFailed."""
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
    FailureCode.OUT_OF_MEMORY: OutOfMemory,
    FailureCode.UNAVAILABLE: Unavailable,
    FailureCode.INTERNAL: InternalError,
}


def error_for(failure: Failure) -> PaddockError:
    """Return the error that the client gets for a worker's failure."""
    if failure.code is FailureCode.UNAUTHORIZED:
        # The client's key is fine; it is the operator who has to act.
        return InternalError(
            "The worker refused this gateway's secret. Start both with the same PADDOCK_WORKER_SECRET."
        )
    if failure.code is FailureCode.CONTEXT_OVERFLOW:
        numbers = {"num_prompt_tokens": failure.num_prompt_tokens, "n_ctx": failure.n_ctx}
        return ContextOverflow(failure.remedy or failure.message, param=failure.param, **numbers)
    return ERRORS[failure.code](failure.message, param=failure.param)
