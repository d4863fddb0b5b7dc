"""Keeps loops going while Redis is away. Failures of Redis become StoreUnavailable and log lines.

Redis counts as away if a command has no readable reply: the server is gone, starting, full, stuck in a script or not
allowed to write, or our keys hold data that no gateway wrote. None of this is the fault of a caller or of the gateway:
meanwhile each gateway places calls on its share of the slots.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from gateway.back_pressure import store_unavailable
from gateway.errors import StoreUnavailable
from gateway.telemetry.metrics import Unread
from workers.redis.trouble import NO_ANSWER, code_of, is_of_one_name, raise_if_cancelled, remedy_for

__all__ = [
    "NO_ANSWER",
    "answered",
    "checked",
    "code_of",
    "is_of_one_name",
    "raise_if_cancelled",
    "reading",
    "remedy_for",
    "unavailable",
]

Answer = TypeVar("Answer")

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, struct.error)
"""Errors that decoding a reply of Redis can raise if another version or program wrote the data. (The decoding errors
of msgspec and Unicode are ValueErrors.)"""


def unavailable(error: BaseException) -> StoreUnavailable:
    """Return the error to raise for callers. The Redis client's own text stays in the log, because it has addresses in
    it."""
    unavailable = store_unavailable()
    unavailable.__cause__ = error
    return unavailable


async def answered(asking: Awaitable[Answer]) -> Answer:
    """Return Redis's reply to a command or pipeline. Raises StoreUnavailable if it gives none."""
    try:
        return await asking
    except NO_ANSWER as error:
        raise unavailable(error) from None


def checked(answers: list[Any]) -> list[Any]:
    """Return `answers`, the replies to a pipeline in which a command's error stands in place of its reply. Raises
    StoreUnavailable if there is such an error."""
    for answer in answers:
        if isinstance(answer, NO_ANSWER):
            raise unavailable(answer)
    return answers


@contextmanager
def reading() -> Iterator[None]:
    """Run a block that reads a reply of Redis. Raise StoreUnavailable if the reply can't be read (UNREADABLE)."""
    try:
        yield
    except UNREADABLE as error:
        raise unavailable(error) from None


log = logging.getLogger(__name__)


class Outage:
    """Handles the outages of Redis that one loop meets. Whatever Redis replies, the loop goes on with the data that it
    read last; an error that ended the loop would end the process."""

    def __init__(self, lost: str, meanwhile: str, back: str) -> None:
        """Set the texts for the log. `lost`: what can't be done in an outage; `meanwhile`: what is done instead;
        `back`: what is logged after the outage (empty: nothing)."""
        self._lost = lost
        self._meanwhile = meanwhile
        self._back = back
        self.lasts = False

    @contextmanager
    def survive(self) -> Iterator[None]:
        """Treat the block as one round of the loop: an error in it ends that round, not the loop."""
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
"""Maximum unreadable entries that the log names: a program that writes such entries may write many."""
MAX_SHOWN = 120


def _ignore(kind: str) -> None:
    """Do nothing: the default of `Unreadable`, for callers that do not count skipped entries."""


class Unreadable:
    """Counts and logs the entries in Redis that one gateway process can't read."""

    def __init__(self, count: Callable[[str], None] = _ignore) -> None:
        """`count` is called for each skipped entry, with the pattern of its key (a value of `Unread`)."""
        self._count = count
        self._told: dict[tuple[Unread, str], None] = {}

    def skip(self, kind: Unread, name: object, why: object) -> None:
        """Record that an entry was skipped. `kind`: the pattern of its key; `name`: the key's name, or the entry's name
        under that key; `why`: the reason why the entry can't be read."""
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
    """Return `what` as a short text on one line, readable whatever bytes it consists of."""
    text = what.decode("utf-8", "backslashreplace") if isinstance(what, bytes) else str(what)
    text = "".join([char if char.isprintable() else ascii(char)[1:-1] for char in text[: MAX_SHOWN + 1]])
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
