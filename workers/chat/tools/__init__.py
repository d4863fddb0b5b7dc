"""Finds tool calls and thoughts in a model's text. Each file has the families of one form."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class ContentPiece(NamedTuple):
    """More of the answer that the caller reads."""

    text: str


class ReasoningPiece(NamedTuple):
    """More of the model's thought before its answer, without the tags."""

    text: str


class CallPiece(NamedTuple):
    """More of tool call `number`, from 0; its first piece carries `id` and `name`, later ones empty text."""

    number: int
    id: str
    name: str
    arguments: str


Piece = ContentPiece | ReasoningPiece | CallPiece


class Parser(Protocol):
    """Parses one answer's text, in any portions; its output does not depend on how the text was cut. Never raises."""

    num_calls: int
    """Tool calls begun so far."""
    is_over: bool
    """Whether the one allowed call is complete: nothing more comes out, and the answer may be ended."""

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self, *, cut_off: bool = False) -> list[Piece]:
        """Return the pieces held back, when the answer has ended. Arguments are made whole, unless the answer was cut
        off; a call that was cut off before its arguments has none.
        """
        ...
