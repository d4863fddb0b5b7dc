"""Chooses the parser for one model's answers, by the model's family (named by its chat template or the catalog), its
vocabulary, and what each request asks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from workers.chat.conversation import UNSET, bounded, conversation_of, is_thinking_off, thought_of
from workers.chat.tools import ContentPiece, Parser, Piece
from workers.chat.tools.family import Ask, Family
from workers.chat.tools.harmony import HARMONY
from workers.chat.tools.json_calls import GEMMA4, GIGACHAT, GIGACHAT_30, HERMES, PLAIN
from workers.chat.tools.json_lists import (
    COMMAND_R,
    COMMAND_R7B,
    FUNCTOOLS_FAMILY,
    GRANITE,
    MISTRAL,
    MISTRAL_LIST,
    NEMOTRON,
    PHI4,
)
from workers.chat.tools.parameters import DEEPSEEK_V4, DEEPSEEK_V32, GLM, MINIMAX, QWEN3_CODER, SEED_OSS
from workers.chat.tools.python_calls import GEMMA, LFM2, LLAMA, PYTHONIC
from workers.chat.tools.token_marks import DEEPSEEK, DEEPSEEK_V31, FUNCTIONARY_V31, FUNCTIONARY_V32, KIMI
from workers.models.spec import ChatDefaults
from workers.protocol.requests import GenerateRequest, Thinking

FAMILIES = (
    *(HARMONY, GEMMA4, KIMI, COMMAND_R7B, COMMAND_R, MISTRAL, MISTRAL_LIST, DEEPSEEK_V32),
    *(DEEPSEEK_V4, DEEPSEEK, DEEPSEEK_V31, GIGACHAT, GIGACHAT_30),
    *(SEED_OSS, MINIMAX, QWEN3_CODER, GLM, FUNCTIONARY_V31, FUNCTIONARY_V32, GRANITE, PHI4, LFM2, PYTHONIC),
    *(NEMOTRON, FUNCTOOLS_FAMILY, HERMES, LLAMA, GEMMA, PLAIN),
)
"""All families, in the order in which a template's marks are compared with theirs."""


class FamilyUnknown(ValueError):
    """No family has the given name; the message lists the families that exist."""


def family_of(template: str, name: str = "") -> Family:
    """Return the family called `name`; without a name, the family that fits the template. A family without thought
    marks of its own gets those found in the template.

    Raises FamilyUnknown."""
    family = _named(name) if name else next((family for family in FAMILIES if family.fits(template)), PLAIN)
    return family if family.thought is not None else replace(family, thought=thought_of(template))


def _named(name: str) -> Family:
    found = next((family for family in FAMILIES if family.name == name), None)
    if found is None:
        known = ", ".join(sorted(family.name for family in FAMILIES))
        raise FamilyUnknown(f"tool_family: there is no family {name!r}; use one of: {known}, or leave it out")
    return found


class Prefaced:
    """A parser that puts a given text before another parser's output. `inner` None: the answer needs no parsing."""

    def __init__(self, preface: str, inner: Parser | None) -> None:
        self._preface = preface
        self._inner = inner
        self.num_calls = 0
        self.is_over = False

    def feed(self, text: str) -> list[Piece]:
        return self._with_preface([ContentPiece(text)] if self._inner is None else self._inner.feed(text))

    def finish(self, *, cut_off: bool = False) -> list[Piece]:
        return self._with_preface([] if self._inner is None else self._inner.finish(cut_off=cut_off))

    def _with_preface(self, pieces: list[Piece]) -> list[Piece]:
        if self._inner is not None:
            self.num_calls, self.is_over = self._inner.num_calls, self._inner.is_over
        if pieces and self._preface:
            pieces, self._preface = [ContentPiece(self._preface), *pieces], ""
        return pieces


MAX_MARK_TOKENS = 16
"""Number of tokens at the end of a prompt that are searched for the mark that opens a thought."""


NONE: Mapping[int, bytes] = MappingProxyType({})


class Vocabulary(Protocol):
    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Sequence[int]: ...

    def piece(self, token: int) -> bytes:
        """Return the bytes of the token's text; empty for control tokens."""

    def special_piece(self, token: int) -> bytes: ...

    @property
    def eog(self) -> frozenset[int]:
        """The tokens that end an answer."""
        ...


class Answers:
    """Makes the parsers for one model's answers. Immutable."""

    def __init__(self, family: Family, vocab: Vocabulary | None = None, defaults: ChatDefaults = UNSET) -> None:
        """`vocab` None: no token counts as a control token, and no prompt counts as ending inside a thought."""
        self.family = family
        self._defaults = defaults
        self.controls: Mapping[int, bytes] = MappingProxyType(_controls(family, vocab) if vocab is not None else {})
        """Control token -> its text, for the control tokens that are marks of the family."""
        self._vocab = vocab
        self.ends: tuple[int, ...] = () if vocab is None else tuple(sorted(vocab.eog))
        """The tokens that end an answer."""

    def parser(self, request: GenerateRequest, prompt: Sequence[int]) -> Parser | None:
        """Return the parser for the answer to one prompt; None: the answer needs no parsing."""
        if not _is_chat(request):
            return None
        opened, split = self.is_thinking(request, prompt), request.thinking.split
        parser = self.family.parser(
            Ask(
                tools=request.tools,
                split=split,
                opened=opened,
                one_call=not request.parallel_tool_calls,
                forced=request.forced_tools,
            )
        )
        return Prefaced(self._opening(prompt), parser) if self.opens_thought(prompt) and not split else parser

    def written(self, request: GenerateRequest) -> Mapping[int, bytes]:
        """Return control tokens, each with its text. The engine writes these texts into the answer's text, because the
        parser or the caller needs them."""
        reads = bool(request.tools) or self.family.thought is not None or self.family.always
        return self.controls if reads and _is_chat(request) else NONE

    def text(self, prompt: Sequence[int]) -> str:
        """Return a prompt's text, in which control tokens are written out; empty without a vocabulary."""
        pieces = map(self._vocab.special_piece, prompt) if self._vocab is not None else ()
        return b"".join(pieces).decode("utf-8", "replace")

    def is_thinking(self, request: GenerateRequest, prompt: Sequence[int]) -> bool:
        """Return whether the answer begins inside a thought: a new one, or one that the caller began."""
        if self.opens_thought(prompt):
            return True
        last = request.messages[-1] if self.family.thought is not None and request.messages else None
        begun = last is not None and last.role == "assistant" and bool(last.reasoning) and not last.content
        return begun and conversation_of(request).continued

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Return whether the prompt ends inside a thought."""
        if self._vocab is None or self.family.thought is None:
            return False
        return self.family.opens_thought(self.text(prompt[-MAX_MARK_TOKENS:]))

    def bounds_of_thought(self, request: GenerateRequest) -> Thinking:
        """Return the request's limits on thoughts; in a chat, the catalog's budget and message are the defaults."""
        return bounded(request.thinking, self._defaults) if _is_chat(request) else request.thinking

    def closing_fault(self, message: str) -> str:
        """Return what is wrong with the `message` that is forced at the end of a thought's budget; empty: nothing."""
        close = self.family.thought.close.strip() if self.family.thought is not None else ""
        if not close or close not in message:
            return ""
        return f"has {close!r} in it, which ends this model's thoughts; leave it out, it is added"

    def has_thought(self, request: GenerateRequest) -> bool:
        """Return whether the model may think: neither the request nor the catalog switched thinking off."""
        return not is_thinking_off(request, self._defaults)

    def _opening(self, prompt: Sequence[int]) -> str:
        """Return the mark that opens a thought at the end of the prompt, with the whitespace after the mark."""
        end = self.text(prompt[-MAX_MARK_TOKENS:])
        mark = self.family.thought.open.rstrip() if self.family.thought is not None else ""
        return end[end.rfind(mark) :]


def _is_chat(request: GenerateRequest) -> bool:
    return request.prompt is None and request.infill is None


def _controls(family: Family, vocab: Vocabulary) -> dict[int, bytes]:
    found = {}
    for mark in family.written:
        tokens = vocab.tokenize(mark, add_special=False, parse_special=True)
        if len(tokens) == 1 and not vocab.piece(tokens[0]):
            found[tokens[0]] = mark.encode()
    return found
