"""How a constraint that can't be kept is told to its caller."""

from __future__ import annotations

from workers.protocol.failures import CallFailed, Failure, FailureCode


class Unusable(ValueError):
    """This constraint can't be kept as it is written. The message says what and why, and what to do."""


class BeyondLimits(Unusable):
    """It takes more than a step of the engine may; a process of its own may follow it."""


def refused(reason: str, param: str) -> CallFailed:
    return CallFailed(Failure(FailureCode.INVALID_REQUEST, f"`{param}`: {reason}", param))


def broken(reason: str) -> CallFailed:
    """A constraint that compiled and can't go on in the middle of an answer."""
    return CallFailed(Failure(FailureCode.INVALID_REQUEST, f"the constraint cannot go on: {reason}"))
