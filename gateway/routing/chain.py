"""Chooses the model of a fallback chain for a call whose answer has not begun. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """The reasons why a call went on to another model."""

    NO_WORKER = "no_worker"
    """No worker would do: gone, draining, circuit open, of another kind, or without the adapters."""
    WAIT = "wait"
    """The predicted wait is longer than the caller waits."""
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    UNSUITED = "unsuited"
    """The model is a fallback for another, and can't do what is asked."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """The prospect of one model of a chain, for one call."""

    model: str
    ready: bool
    """Whether it has a worker that would do."""
    wait_s: float
    """Predicted seconds until a slot is free."""


def chosen(outlooks: Iterable[Outlook], patience_s: float) -> Outlook | None:
    """Return the first that is ready within `patience_s`, else the soonest that is ready at all. None: none is.

    `outlooks` are in the order of the chain; those behind the first that will do are not looked at.
    """
    late: list[Outlook] = []
    for outlook in outlooks:
        if outlook.ready and outlook.wait_s <= patience_s:
            return outlook
        if outlook.ready:
            late.append(outlook)
    return min(late, key=lambda outlook: outlook.wait_s, default=None)
