"""Describes a family of models: the parser of its answers, the syntax of its calls, and the marks of its thoughts."""

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
    """Whether a thought can begin anywhere in an answer, and not only at the answer's start or after a call."""
    closing: str = ""
    """Text that is forced on the model to close its thought; if this is empty, `close` is used."""


@dataclass(frozen=True, slots=True)
class Ask:
    """The options that a request sets for the parser of its answer."""

    tools: tuple[Tool, ...] = ()
    """The request's tools; without tools, the marks of calls are plain text."""
    split: bool = True
    """Whether thoughts come out as pieces of their own; False: they come out as text, with their marks."""
    opened: bool = False
    """Whether the prompt ends inside a thought."""
    one_call: bool = False
    """Whether the answer ends after its first call."""
    forced: tuple[str, ...] = ()
    """Names of tools: the answer must call one of them."""


def exact(text: str) -> str:
    """Return `text` as `CallSyntax` writes it: each space is doubled, since a single one means optional whitespace."""
    return text.replace(" ", "  ")


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a family writes calls, for grammars. In the texts, " " stands for optional whitespace, "  " for a space."""

    before: str
    """Text of each call before the tool's name."""
    middle: str
    """Text between the tool's name and the arguments."""
    after: str
    lead: str = ""
    """Optional text at the very beginning of an answer or of its calls."""
    answer: str = ""
    """Text that the model writes first if it answers the user instead of calling a tool."""
    open: str = ""
    """Text before the first of the calls, once per answer."""
    between: str = " "
    close: str = ""
    """Text after the last of the calls, once per answer."""
    triggers: tuple[str, ...] = ()
    """Texts with which the first call can begin. If the model need not call a tool, the grammar applies once it writes
    such a text. If there are none, calls can be kept to a grammar only where the request forces them."""
    parameter: tuple[str, tuple[str, ...], str] | None = None
    """The marks of a parameter, in families that do not write arguments as one JSON object: the text before its name,
    the text between name and value (if there are two: before a string, and before JSON), the text after its value."""


def list_syntax(
    open: str, close: str = "", *, trigger: str = "", name: str = "name", arguments: str = "arguments"
) -> CallSyntax:
    """Return the syntax of calls that are one JSON list between `open` and `close`. `trigger`: if empty, `open`."""
    return CallSyntax(
        open=f"{open} [ ",
        before=f'{{ "{name}": "',
        middle=f'" , "{arguments}": ',
        after=" }",
        between=" , ",
        close=f" ] {close}" if close else " ]",
        triggers=(trigger or open,),
    )


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models whose answers have the same form. `name`: the family's name in the catalog."""

    name: str
    parse: Callable[[Family, Ask], Parser]
    syntax: CallSyntax
    """Syntax of calls for grammars. If no grammar can express the family's own, another that its parser reads."""
    marks: tuple[tuple[str, ...], ...] = ()
    """Sets of texts: a chat template belongs to this family if it contains all texts of one set."""
    controls: tuple[str, ...] = ()
    """Marks that the parser must see. Those that are control tokens are written into the answer's text for it."""
    thought: ThoughtMarks | None = None
    calls_end_thoughts: bool = False
    """Whether a call in the middle of a thought ends the thought. True for families whose thoughts never mention the
    marks of calls."""
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
        """The text that is forced on the model to close its thought; empty if the model does not think."""
        return self.thought.closing or self.thought.close if self.thought else ""
