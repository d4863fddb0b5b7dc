"""What a source of calls hands to the driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

Message = dict[str, str]


@dataclass(slots=True)
class Ask:
    """One call. `talk` is the source's own, which it finds again when the call has ended."""

    messages: list[Message]
    answer_tokens: int
    talk: object = None


class Source(Protocol):
    """Never blocks; called by one task at a time."""

    def next(self) -> Ask | None:
        """What to ask now; None where there is no more."""

    def ended(self, ask: Ask, answer: str, *, good: bool) -> None:
        """The call is over; `answer` is its text."""
