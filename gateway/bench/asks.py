"""The requests that a source hands to the driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

Message = dict[str, str]


@dataclass(slots=True)
class Ask:
    """One request. `talk` is the source's own data, which it gets back when the call has ended."""

    messages: list[Message]
    answer_tokens: int
    talk: object = None


class Source(Protocol):
    """Makes the requests of a run. It never blocks, and one task at a time calls it."""

    def next(self) -> Ask | None:
        """Return the next request; None where there are no more."""

    def ended(self, ask: Ask, answer: str, *, good: bool) -> None:
        """Take in that the call is over; `answer` is its text."""
