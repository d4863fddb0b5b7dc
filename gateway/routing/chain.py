"""Which model of a chain a call goes to, while its answer has not begun. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a call went on to another model."""

    NO_WORKER = "no_worker"
    """None that would do: gone, draining, left alone, of another kind, without the adapters."""
    WAIT = "wait"
    """The predicted wait is longer than the caller waits."""
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    UNSUITED = "unsuited"
    """It stands in for another model, and can't do what is asked."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """One model of a chain, for one call."""

    model: str
    ready: bool
    """It has a worker that would do."""
    wait_s: float
    """Predicted, for a slot."""


def chosen(outlooks: Iterable[Outlook], patience_s: float) -> Outlook | None:
    """The first that is ready in time, else the soonest of those that are ready at all. None: none is.

    `outlooks` in the order of the chain; those behind the first that will do are not looked at.
    """
    late: list[Outlook] = []
    for outlook in outlooks:
        if outlook.ready and outlook.wait_s <= patience_s:
            return outlook
        if outlook.ready:
            late.append(outlook)
    return min(late, key=lambda outlook: outlook.wait_s, default=None)
