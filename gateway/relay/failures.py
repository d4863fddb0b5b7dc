"""Turns a worker's failure into an error for the client, by one table."""

from __future__ import annotations

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
from workers.protocol.failures import Failure, FailureCode

BUSY_RETRY_AFTER_S = 1.0

COMES_BACK = frozenset({FailureCode.BUSY, FailureCode.DRAINING, FailureCode.OUT_OF_MEMORY, FailureCode.UNAVAILABLE})
"""Failures that are over soon, here or at another worker: the answer has a `retry-after`."""

ANSWERS: dict[FailureCode, type[PaddockError]] = {
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


def answer_to(failure: Failure) -> PaddockError:
    """Return the error that the client gets for a worker's failure."""
    if failure.code is FailureCode.UNAUTHORIZED:
        # The client's key is fine; it is the operator who has to act.
        return InternalError(
            "The worker refused this gateway's secret. Start both with the same PADDOCK_WORKER_SECRET."
        )
    if failure.code is FailureCode.CONTEXT_OVERFLOW:
        numbers = {"num_prompt_tokens": failure.num_prompt_tokens, "n_ctx": failure.n_ctx}
        return ContextOverflow(failure.remedy or failure.message, param=failure.param, **numbers)
    retry_after_s = BUSY_RETRY_AFTER_S if failure.code in COMES_BACK else None
    return ANSWERS[failure.code](failure.message, param=failure.param, retry_after_s=retry_after_s)
