"""Keeps loops going while Redis is away, and turns its failures into StoreUnavailable and log lines.

A command without a readable reply counts as Redis being away: a server that is gone, starting, full, stuck in a
script, not allowed to write, or that has other data in our keys than what gateways wrote there. None of it is a
caller's fault or a fault in the gateway: calls are placed on shares meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from gateway.back_pressure import store_unavailable
from gateway.errors import StoreUnavailable
from gateway.telemetry.metrics import Unread
from workers.redis.trouble import NO_ANSWER, code_of, is_of_one_name, remedy_for


def raise_if_cancelled() -> None:
    """Raise CancelledError where this task was cancelled and still runs; loops that use Redis call this every round.

    redis-py sends through `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that arrives just as the
    command has been sent (python/cpython#86296).
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


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
    unavailable = store_unavailable()
    unavailable.__cause__ = error
    return unavailable


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


log = logging.getLogger(__name__)


class Outage:
    """The outages that one loop meets. No answer of Redis ends the loop, and so the process: the last data is kept."""

    def __init__(self, lost: str, meanwhile: str, back: str) -> None:
        """Texts for the log: something can't be done, what holds meanwhile, it can again (empty: not logged)."""
        self._lost = lost
        self._meanwhile = meanwhile
        self._back = back
        self.lasts = False

    @contextmanager
    def survive(self) -> Iterator[None]:
        """Run one round of the loop; an error in it ends the round only."""
        try:
            yield
        except (StoreUnavailable, *NO_ANSWER) as error:
            cause = error.__cause__ if isinstance(error, StoreUnavailable) and error.__cause__ else error
            self._begin(f"{type(cause).__name__}: {cause}; {remedy_for(cause)}")
        except Exception as error:  # the loop's edge: whatever others have written there, the service goes on
            if not self.lasts:
                log.exception("what Redis holds was not understood")
            self._begin(f"{type(error).__name__}: {error}")
        else:
            if self.lasts and self._back:
                log.info("%s", self._back)
            self.lasts = False

    def _begin(self, why: str) -> None:
        if not self.lasts:
            log.warning("%s (%s); %s", self._lost, why, self._meanwhile)
        self.lasts = True


MAX_TOLD = 256
"""Most entries that the log names; whatever writes such things may write many."""
MAX_SHOWN = 120


def _ignore(kind: str) -> None:
    """Ignore entries that were skipped."""


class Unreadable:
    """Counts and logs the unreadable entries that one gateway process meets."""

    def __init__(self, count: Callable[[str], None] = _ignore) -> None:
        """`count` is called for each skipped entry with the kind of its key."""
        self._count = count
        self._told: dict[tuple[Unread, str], None] = {}

    def skip(self, kind: Unread, name: object, why: object) -> None:
        """Record that an entry of that kind was left out. `name`: of the key or of the entry in it."""
        self._count(kind.value)
        if len(self._told) >= MAX_TOLD:
            return
        shown = _shorten(name)
        if (kind, shown) in self._told:
            return
        self._told[kind, shown] = None
        log.error(
            "what stands in Redis under %s, %s, can't be read and is left out: %s; see what else writes there",
            kind.value,
            shown,
            _shorten(why),
        )


def _shorten(what: object) -> str:
    """Return a text that is short, on one line, and readable whatever bytes it is made of."""
    text = what.decode("utf-8", "backslashreplace") if isinstance(what, bytes) else str(what)
    text = "".join([char if char.isprintable() else ascii(char)[1:-1] for char in text[: MAX_SHOWN + 1]])
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
