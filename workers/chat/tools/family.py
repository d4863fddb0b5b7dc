"""The description of a family of models: the parser of its answers, the syntax of its calls, its thoughts' marks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workers.chat.tools import Parser
from workers.protocol.requests import Tool


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """The marks around a model's thought."""

    open: str
    close: str
    anywhere: bool = False
    """Whether a thought may begin in the middle of an answer, and not only before it or after a call."""
    closing: str = ""
    """Text that is written for the model to close the thought, where more than `close` must follow."""


@dataclass(frozen=True, slots=True)
class Ask:
    """The request's wishes for the parser of its answer."""

    tools: tuple[Tool, ...] = ()
    """The request's tools; empty: marks of calls are text."""
    split: bool = True
    """Whether thoughts come as pieces of their own; False: as text, with their marks."""
    opened: bool = False
    """Whether the prompt ends inside a thought."""
    one_call: bool = False
    """Whether the answer ends after its first call."""
    forced: tuple[str, ...] = ()
    """Names of the tools of which the answer must call one."""


def exact(text: str) -> str:
    """Return the text for a `CallSyntax` in which each space stands for itself."""
    return text.replace(" ", "  ")


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The syntax of calls, for grammars. One space stands for optional whitespace, two for one space."""

    before: str
    """Text of a call before its name."""
    middle: str
    """Text between name and arguments."""
    after: str
    lead: str = ""
    """Optional text before all else."""
    answer: str = ""
    """Text before an answer that is no call."""
    open: str = ""
    """Text before the first call."""
    between: str = " "
    close: str = ""
    """Text after the last call."""
    triggers: tuple[str, ...] = ()
    """Texts with which the first call begins; none: a grammar can't begin in the middle of an answer."""
    parameter: tuple[str, tuple[str, ...], str] | None = None
    """Where arguments are not JSON: the text before a parameter's name, that between name and value (for text, and for
    JSON where that differs), and that after the value."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models, by the form of their answers. `name` is what a catalog may call it."""

    name: str
    parse: Callable[[Family, Ask], Parser]
    syntax: CallSyntax
    """Syntax for grammars; where they can't express the family's own, another one that its parser reads."""
    marks: tuple[tuple[str, ...], ...] = ()
    """Sets of texts: a chat template is this family's if it has all texts of one set."""
    controls: tuple[str, ...] = ()
    """Marks that the parser must see. If they are control tokens, the engine writes them into the text."""
    thought: ThoughtMarks | None = None
    calls_end_thoughts: bool = False
    """Whether a call in the middle of a thought ends it, since no thought mentions its marks."""
    always: bool = False
    """Whether answers are never plain text, so that a parser is needed even without tools and thoughts."""

    def parser(self, ask: Ask) -> Parser | None:
        """Return the parser of an answer; None: the text needs no parsing."""
        thinks = self.thought is not None and ask.split
        return self.parse(self, ask) if ask.tools or thinks or self.always else None

    def fits(self, template: str) -> bool:
        return any(all(text in template for text in texts) for texts in self.marks)

    def opens_thought(self, prompt: str) -> bool:
        """Return whether a prompt with this end leaves the model inside a thought."""
        return self.thought is not None and prompt.rstrip().endswith(self.thought.open.rstrip())

    @property
    def written(self) -> tuple[str, ...]:
        """All marks that a parser looks for."""
        thought = (self.thought.open, self.thought.close) if self.thought else ()
        return (*self.controls, *(mark.strip() for mark in thought))

    @property
    def thought_close(self) -> str:
        """The text that closes a thought for the model; empty if it does not think."""
        return self.thought.closing or self.thought.close if self.thought else ""
