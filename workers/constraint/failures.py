"""Errors for a constraint that can't be enforced, and how they are reported to the caller."""

from __future__ import annotations

from workers.protocol.failures import CallFailed, Failure, FailureCode


class Unusable(ValueError):
    """A constraint can't be enforced as it is written. The message says what and why, and what to do."""


class BeyondLimits(Unusable):
    """A constraint takes more time than a step of the engine may; a process of its own may follow it."""


def refused(reason: str, param: str) -> CallFailed:
    return CallFailed(Failure(FailureCode.INVALID_REQUEST, f"`{param}`: {reason}", param))


def killed() -> CallFailed:
    """Return the failure of a call whose grammar's process was ended from outside."""
    message = "the process that follows the grammar was killed, for want of memory perhaps; send it again"
    return CallFailed(Failure(FailureCode.OUT_OF_MEMORY, message))


def unavailable(reason: str) -> CallFailed:
    """Return the failure of a call whose grammar can't be tried or followed, which is not the grammar's fault."""
    message = f"grammars can't be tried or followed on this worker now: {reason}; send it again"
    return CallFailed(Failure(FailureCode.UNAVAILABLE, message))


def broken(reason: str) -> CallFailed:
    """Return the failure of a call whose constraint compiled and can't go on in the middle of the answer."""
    return CallFailed(Failure(FailureCode.INVALID_REQUEST, f"the constraint cannot go on: {reason}"))
