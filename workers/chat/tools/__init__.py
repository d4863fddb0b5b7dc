"""Finds tool calls and thoughts in a model's text. There is one module for each form in which families write calls."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class ContentPiece(NamedTuple):
    """More text of the answer, for the caller to read."""

    text: str


class ReasoningPiece(NamedTuple):
    """More text of the model's thought before its answer, without the tags around it."""

    text: str


class CallPiece(NamedTuple):
    """More of tool call `number`, from 0; its first piece has `id` and `name`, in later pieces both are empty."""

    number: int
    id: str
    name: str
    arguments: str


Piece = ContentPiece | ReasoningPiece | CallPiece


class Parser(Protocol):
    """Parses one answer's text, fed in portions; the output does not depend on where portions end. Never raises."""

    num_calls: int
    """Number of tool calls begun so far."""
    is_over: bool
    """Whether the only call allowed is complete: no more pieces are returned, and the answer can be ended."""

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self, *, cut_off: bool = False) -> list[Piece]:
        """Return the pieces held back, once the answer has ended. Unfinished arguments are completed, unless the answer
        was cut off; a call that was cut off before its arguments is returned without arguments."""
        ...
