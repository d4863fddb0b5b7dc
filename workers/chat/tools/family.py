"""The description of a family of models: its answers' parser, its calls' syntax, and the marks of its thoughts."""

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
    """Whether a thought may begin anywhere in an answer, and not only at its start or after a call."""
    closing: str = ""
    """Text written in the model's place to close a thought, if more than `close` is needed."""


@dataclass(frozen=True, slots=True)
class Ask:
    """The options that a request sets for the parser of its answer."""

    tools: tuple[Tool, ...] = ()
    """The request's tools; empty: the marks of calls are plain text."""
    split: bool = True
    """Whether thoughts come out as pieces of their own; False: they come out as text, with their marks."""
    opened: bool = False
    """Whether the prompt ends inside a thought."""
    one_call: bool = False
    """Whether the answer ends after its first call."""
    forced: tuple[str, ...] = ()
    """Names of tools: the answer must call one of them."""


def exact(text: str) -> str:
    """Return a text for a field of `CallSyntax` in which each space stands for itself."""
    return text.replace(" ", "  ")


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a family writes calls, for grammars. One space stands for optional whitespace, two stand for one space."""

    before: str
    """Text of a call before the tool's name."""
    middle: str
    """Text between the tool's name and the arguments."""
    after: str
    lead: str = ""
    """Optional text before all other parts."""
    answer: str = ""
    """Text before an answer that is not a call."""
    open: str = ""
    """Text before the first call."""
    between: str = " "
    close: str = ""
    """Text after the last call."""
    triggers: tuple[str, ...] = ()
    """Texts with which the first call may begin; none: a grammar can't begin in the middle of an answer."""
    parameter: tuple[str, tuple[str, ...], str] | None = None
    """For arguments that are not JSON: the text before a parameter's name; the texts between name and value (for text,
    and for JSON if that differs); the text after the value."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models whose answers have the same form. `name`: how the catalog may call the family."""

    name: str
    parse: Callable[[Family, Ask], Parser]
    syntax: CallSyntax
    """Syntax for grammars; if they can't express the family's own, another syntax that its parser reads."""
    marks: tuple[tuple[str, ...], ...] = ()
    """Sets of texts: a chat template belongs to this family if it contains all texts of one set."""
    controls: tuple[str, ...] = ()
    """Marks that the parser must see. If they are control tokens, the engine writes them into the text."""
    thought: ThoughtMarks | None = None
    calls_end_thoughts: bool = False
    """Whether a call in the middle of a thought ends the thought, since this family's thoughts never mention marks of
    calls."""
    always: bool = False
    """Whether answers are never plain text: they need a parser even without tools and thoughts."""

    def parser(self, ask: Ask) -> Parser | None:
        """Return the parser for an answer; None: the answer's text needs no parsing."""
        thinks = self.thought is not None and ask.split
        return self.parse(self, ask) if ask.tools or thinks or self.always else None

    def fits(self, template: str) -> bool:
        return any(all(text in template for text in texts) for texts in self.marks)

    def opens_thought(self, prompt: str) -> bool:
        """Return whether the model is inside a thought after a prompt that ends with this text."""
        return self.thought is not None and prompt.rstrip().endswith(self.thought.open.rstrip())

    @property
    def written(self) -> tuple[str, ...]:
        """The marks that a parser of this family looks for."""
        thought = (self.thought.open, self.thought.close) if self.thought else ()
        return (*self.controls, *(mark.strip() for mark in thought))

    @property
    def thought_close(self) -> str:
        """The text that closes a thought in the model's place; empty if the model does not think."""
        return self.thought.closing or self.thought.close if self.thought else ""
