"""How a constraint that can't be kept is told to its caller."""

from __future__ import annotations

from workers.protocol.failures import CallFailed, Failure, FailureCode


class Unusable(ValueError):
    """This constraint can't be kept as it is written. The message says what and why, and what to do."""


class BeyondLimits(Unusable):
    """It takes more than a step of the engine may; a process of its own may follow it."""


def refused(reason: str, param: str) -> CallFailed:
    return CallFailed(Failure(FailureCode.INVALID_REQUEST, f"`{param}`: {reason}", param))


def killed() -> CallFailed:
    """Return what a caller is told whose grammar's process somebody else ended."""
    message = "the process that follows the grammar was killed, for want of memory perhaps; send it again"
    return CallFailed(Failure(FailureCode.OUT_OF_MEMORY, message))


def unavailable(reason: str) -> CallFailed:
    """Return what a caller is told where a grammar can't be tried or followed, which is not the grammar's fault."""
    message = f"grammars can't be tried or followed on this worker now: {reason}; send it again"
    return CallFailed(Failure(FailureCode.UNAVAILABLE, message))


def broken(reason: str) -> CallFailed:
    """A constraint that compiled and can't go on in the middle of an answer."""
    return CallFailed(Failure(FailureCode.INVALID_REQUEST, f"the constraint cannot go on: {reason}"))
