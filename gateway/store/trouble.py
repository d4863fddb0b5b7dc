"""Turns failures of Redis (`workers.redis_trouble`) into StoreUnavailable for callers.

A command without a readable reply counts as Redis being away: a server that is gone, starting, full, stuck in a script,
not allowed to write, or that has other data in our keys than what gateways wrote there. None of it is a caller's fault
or a fault in the gateway: calls are placed on shares meanwhile.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from gateway.errors import StoreUnavailable
from workers.redis_trouble import NO_ANSWER, code_of, is_of_one_name, remedy_for

__all__ = [
    "NO_ANSWER",
    "answered",
    "checked",
    "code_of",
    "is_of_one_name",
    "reading",
    "remedy_for",
    "unavailable",
]

Answer = TypeVar("Answer")

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, struct.error)
"""Errors of reading an answer that this version did not write; msgspec's and Unicode's are ValueErrors."""


def unavailable(error: BaseException) -> StoreUnavailable:
    """Return the error for callers; the Redis client's own text has addresses in it, so it stays in the log."""
    told = StoreUnavailable("This gateway's store does not answer. Send the request again.", retry_after_s=1.0)
    told.__cause__ = error
    return told


async def answered(asking: Awaitable[Answer]) -> Answer:
    """Return the answer of a command or pipeline. Raises StoreUnavailable where there is none."""
    try:
        return await asking
    except NO_ANSWER as error:
        raise unavailable(error) from None


def checked(answers: list[Any]) -> list[Any]:
    """Return the answers of a pipeline that does not raise. Raises StoreUnavailable where one of them is an error."""
    for answer in answers:
        if isinstance(answer, NO_ANSWER):
            raise unavailable(answer)
    return answers


@contextmanager
def reading() -> Iterator[None]:
    """Turn errors of reading an answer inside the block into StoreUnavailable."""
    try:
        yield
    except UNREADABLE as error:
        raise unavailable(error) from None
