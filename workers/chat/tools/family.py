"""What sets one family of models apart: how its answers are read, how its calls are written, where its thoughts end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workers.chat.tools import Parser
from workers.protocol.requests import Tool


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """Marks around what a model thinks."""

    open: str
    close: str
    anywhere: bool = False
    """A thought may begin in the middle of an answer, and not only before it or after a call."""
    closing: str = ""
    """What is said for the model to close it, where more than `close` must follow."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What one call wants of its answer's parser."""

    tools: tuple[Tool, ...] = ()
    """None: marks of calls are text."""
    split: bool = True
    """Thoughts come as pieces of their own; False: as text, with their marks."""
    opened: bool = False
    """The prompt ends inside of a thought."""
    one_call: bool = False
    """The answer ends after its first call."""
    forced: tuple[str, ...] = ()
    """Names of tools of which the answer must call one."""


def exact(text: str) -> str:
    """The text for a `CallSyntax`, with each space as it is."""
    return text.replace(" ", "  ")


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How calls are written, for grammars. One space stands for whitespace that may be left out, two for one space."""

    before: str
    """Of a call: what precedes its name."""
    middle: str
    """What stands between name and arguments."""
    after: str
    lead: str = ""
    """What may come before all else, and may be left out."""
    answer: str = ""
    """What precedes an answer that is no call."""
    open: str = ""
    """What precedes the first call."""
    between: str = " "
    close: str = ""
    """What follows the last call."""
    triggers: tuple[str, ...] = ()
    """Texts with which the first call begins; none: a grammar can't begin in the middle of an answer."""
    parameter: tuple[str, tuple[str, ...], str] | None = None
    """Where arguments are not JSON: what precedes a parameter's name, stands between name and value (of text, and of
    JSON where that differs), and follows the value."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models, by the form of their answers. `name` is what a catalog may call it."""

    name: str
    parse: Callable[[Family, Ask], Parser]
    syntax: CallSyntax
    """Where a grammar can't keep to the family's own form, another one that its parser reads."""
    marks: tuple[tuple[str, ...], ...] = ()
    """A chat template is this family's if it has all texts of one of these."""
    controls: tuple[str, ...] = ()
    """Marks that the parser must see. Where they are control tokens, the engine writes them into the text."""
    thought: ThoughtMarks | None = None
    calls_end_thoughts: bool = False
    """A call in the middle of a thought ends it: its marks are ones that no thought speaks of."""
    always: bool = False
    """Its answers are never plain text: a parser is needed even without tools and thoughts."""

    def parser(self, ask: Ask) -> Parser | None:
        """None: the text needs no reading."""
        thinks = self.thought is not None and ask.split
        return self.parse(self, ask) if ask.tools or thinks or self.always else None

    def fits(self, template: str) -> bool:
        return any(all(text in template for text in texts) for texts in self.marks)

    def opens_thought(self, prompt: str) -> bool:
        """Whether a prompt that ends like this leaves the model in the middle of a thought."""
        return self.thought is not None and prompt.rstrip().endswith(self.thought.open.rstrip())

    @property
    def written(self) -> tuple[str, ...]:
        """All marks that a parser looks for."""
        thought = (self.thought.open, self.thought.close) if self.thought else ()
        return (*self.controls, *(mark.strip() for mark in thought))

    @property
    def thought_close(self) -> str:
        """What ends a thought for the model; empty if it does not think."""
        return self.thought.closing or self.thought.close if self.thought else ""
