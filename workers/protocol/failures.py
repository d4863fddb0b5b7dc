"""The failures of one call on a worker, as data: the gateway translates each code once, where it enters.

code               HTTP status   may be retried on another worker before the first event
-----------------  -----------   --------------------------------------------------------
invalid_request    400           no
context_overflow   400           no
unsupported        400           no   (the model or this version cannot do what is asked)
unauthorized       401           no   (wrong shared secret)
busy               429           yes  (every slot and the waiting room are taken)
draining           503           yes
worker_lost        502           yes  (written by the gateway, when the worker is gone)
storage_full       503           no   (what is to be kept is over the team's bound, or everybody's)
out_of_memory      503           yes  (the worker could not get the memory; nothing is wrong with the call)
unavailable        503           yes  (a helper process that the call needs does not start, or has no time for it)
internal           500           yes
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FailureCode(StrEnum):
    INVALID_REQUEST = "invalid_request"
    CONTEXT_OVERFLOW = "context_overflow"
    UNSUPPORTED = "unsupported"
    UNAUTHORIZED = "unauthorized"
    BUSY = "busy"
    DRAINING = "draining"
    WORKER_LOST = "worker_lost"
    STORAGE_FULL = "storage_full"
    OUT_OF_MEMORY = "out_of_memory"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


RETRYABLE = frozenset(
    {
        FailureCode.BUSY,
        FailureCode.DRAINING,
        FailureCode.WORKER_LOST,
        FailureCode.OUT_OF_MEMORY,
        FailureCode.UNAVAILABLE,
        FailureCode.INTERNAL,
    }
)

HTTP_STATUS = {
    FailureCode.INVALID_REQUEST: 400,
    FailureCode.CONTEXT_OVERFLOW: 400,
    FailureCode.UNSUPPORTED: 400,
    FailureCode.UNAUTHORIZED: 401,
    FailureCode.BUSY: 429,
    FailureCode.DRAINING: 503,
    FailureCode.WORKER_LOST: 502,
    FailureCode.STORAGE_FULL: 503,
    FailureCode.OUT_OF_MEMORY: 503,
    FailureCode.UNAVAILABLE: 503,
    FailureCode.INTERNAL: 500,
}


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """One failed call. `message` names the thing, the limit and the remedy; `param` the field to blame, if any."""

    code: FailureCode
    message: str
    param: str | None = None
    num_prompt_tokens: int = 0
    """Tokens of the prompt, of a `context_overflow`; so is `n_ctx`."""
    n_ctx: int = 0
    """Most tokens that would fit."""
    remedy: str = ""
    """Remedy of a `context_overflow`: the message without its numbers, which each dialect words in its own way."""


def context_overflow(num_prompt_tokens: int, n_ctx: int, *, is_whole: bool = True) -> Failure:
    """Return the failure of a prompt that is too long. `is_whole` False: it has at least so many tokens."""
    counted = "" if is_whole else "counting stopped at that number; "
    remedy = f"{counted}shorten it or serve the model with a larger --ctx"
    message = f"the prompt has {num_prompt_tokens} tokens, the context {n_ctx}, answer included; {remedy}"
    return Failure(FailureCode.CONTEXT_OVERFLOW, message, "messages", num_prompt_tokens, n_ctx, remedy)


class CallFailed(Exception):
    """Raised inside a process to carry a `Failure` to the place that answers for the call."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure
