"""What Redis says when it does not answer the question (`workers.redis_trouble`) becomes StoreUnavailable for callers.

Whatever a command ends with but a reply that can be read counts as Redis away: a server that is gone, starting, full,
stuck in a script, not allowed to write, or that has something else under our names than what gateways wrote there.
None of it is a caller's fault, and none of it a fault in the gateway: calls are placed on shares meanwhile.
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
"""What reading an answer raises that is not as this version wrote it; msgspec's and Unicode's are ValueErrors."""


def unavailable(error: BaseException) -> StoreUnavailable:
    """What callers get to read; the client's own words have addresses in them, so they stay in the log."""
    told = StoreUnavailable("This gateway's store does not answer. Send the request again.", retry_after_s=1.0)
    told.__cause__ = error
    return told


async def answered(asking: Awaitable[Answer]) -> Answer:
    """The answer of a command or pipeline. Raises StoreUnavailable where there is none."""
    try:
        return await asking
    except NO_ANSWER as error:
        raise unavailable(error) from None


def checked(answers: list[Any]) -> list[Any]:
    """The answers of a pipeline that does not raise. Raises StoreUnavailable where one of them is none."""
    for answer in answers:
        if isinstance(answer, NO_ANSWER):
            raise unavailable(answer)
    return answers


@contextmanager
def reading() -> Iterator[None]:
    """Reads an answer inside the block. Raises StoreUnavailable where it can't be read."""
    try:
        yield
    except UNREADABLE as error:
        raise unavailable(error) from None
