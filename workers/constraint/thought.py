"""Masks for models that think before they answer: the thought is free but bounded, the answer is constrained.

Source of how a budget works: common/reasoning-budget.cpp of llama.cpp. Unlike there, a closing tag that has begun when
the budget ends is completed, and a model that would end or begin its answer within the thought must close the thought
first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from operator import itemgetter
from typing import Protocol

import numpy as np

from workers.chat.answers import Answers
from workers.constraint.mask import Bits, Mask, Vocabulary, bits_for
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.requests import UNBOUNDED, GenerateRequest


@dataclass(frozen=True, slots=True)
class Thought:
    """The marks of a model's thought, and how long the thought may be in one call."""

    open: str
    close: str
    closing: str = ""
    """Text that the model is forced to write to close the thought, ending with `close`. Empty: `close` is forced."""
    ends: tuple[str, ...] = ()
    """Texts that also end the thought: beginnings of tool calls, for models that call without closing their thought."""
    is_open: bool = False
    """Whether the prompt ends within a thought."""
    budget: int = UNBOUNDED
    """Maximum number of tokens of a thought; after them, the closing text is forced. -1: no bound."""
    message: str = ""
    """Text that the model is forced to write before the closing text if the thought's budget is used up."""
    again: bool = False
    """Whether more thoughts can come in the middle of an unconstrained answer; each has the whole budget."""


class Words(Vocabulary, Protocol):
    """A vocabulary that also has the texts of its control tokens, and can tokenise a text."""

    def special_piece(self, token: int) -> bytes: ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...


class _Place(Enum):
    BEFORE = auto()
    """No thought yet, but all text so far (if any) can be the beginning of the opening tag."""
    INSIDE = auto()
    AFTER = auto()


class ThoughtMask:
    """The mask of a thought and the answer after it, or of the answer alone if no thought comes. `begin` is a function
    that makes the answer's mask; if `begin` is None, the answer is not constrained.

    Do not make a ThoughtMask on the engine's thread: tokenising the thought's message takes too long for a step. If the
    answer's first text may be both the opening tag and an answer, it is a thought once the tag is complete."""

    def __init__(self, thought: Thought, words: Words, begin: Callable[[], Mask] | None) -> None:
        self._words = words
        self._inner = begin() if begin is not None else None
        self._later = begin() if begin is not None and not thought.is_open else None
        """The mask of an answer after a thought: a new one, since `_inner` may have taken tokens of the opening tag."""
        self._budget, self._again = thought.budget, thought.again
        self._open, self._close = thought.open.encode(), thought.close.encode()
        self._closing = thought.closing.encode() or self._close
        said = thought.message if thought.budget != UNBOUNDED else ""
        self._ending = tuple(self._tokens(said.encode() + self._closing)) if said else ()
        """Tokens of the message and of the closing text; making them takes milliseconds, too long for a step."""
        self._ends = tuple(mark.encode() for mark in thought.ends)
        self._reach = max(map(len, (self._close, self._closing, b"1234", *self._ends))) - 1
        """Maximum number of bytes at the end of the text that can belong to an unfinished mark or character."""
        self._place = _Place.BEFORE
        self._tail = b""
        """The end of the text so far that can belong to a tag."""
        self._tag_only = False
        """Whether no constrained answer can begin with the text so far, so that it must become the opening tag."""
        self._left = 0
        self._forced: deque[int] = deque()
        if thought.is_open:
            self._begin_thought(b"")

    @property
    def is_done(self) -> bool:
        return self._inner is not None and self._place is _Place.AFTER and self._inner.is_done

    def permits(self, token: int) -> bool:
        """Return whether `token` may come next. If a thought must be closed before `token`, force the closing tag."""
        if self._forced:
            return token == self._forced[0]
        inner = self._inner
        if inner is None:
            return True
        if self._place is _Place.INSIDE:
            if self._leaves_thought(token):
                self._close_thought()
                return token == self._forced[0]
            return True
        if self._place is _Place.AFTER:
            return inner.permits(token)
        return self._furthers_tag(token) or (not self._tag_only and inner.permits(token))

    def allowed(self) -> Bits | None:
        if self._forced:
            return self._only(self._forced[0])
        if self._inner is None or self._place is _Place.INSIDE:
            return None
        if self._place is _Place.AFTER:
            return self._inner.allowed()
        tag = self._tokens(self._open[len(self._tail) :])[0]
        if self._tag_only:
            return self._only(tag)
        bits = self._inner.allowed()
        if bits is not None:
            bits = bits.copy()
            bits[tag >> 5] |= _bit(tag)
        return bits

    def accept(self, token: int) -> None:
        piece = self._words.special_piece(token)
        if self._forced:
            self._forced.popleft()
            if not self._forced:
                self._end_thought()
        elif self._place is _Place.INSIDE:
            self._think(piece)
        elif self._place is _Place.BEFORE:
            self._begin(token, piece)
        elif self._inner is not None:
            self._inner.accept(token)
        elif self._again:
            self._watch_for_thought(piece)

    def forced(self) -> Sequence[int]:
        if self._forced:
            return tuple(self._forced)
        return self._inner.forced() if self._inner is not None and self._place is _Place.AFTER else ()

    def _think(self, piece: bytes) -> None:
        self._tail += piece
        if any(mark in self._tail for mark in (self._close, *self._ends)):
            self._end_thought()
            return
        self._tail = self._tail[-self._reach :]
        self._left -= 1
        if self._budget != UNBOUNDED and self._left <= 0 and _is_whole(self._tail):
            self._end_budget()

    def _watch_for_thought(self, piece: bytes) -> None:
        tail = self._tail + piece
        start = tail.find(self._open)
        if start >= 0:
            self._begin_thought(tail[start + len(self._open) :])
        else:
            self._tail = tail[max(0, len(tail) - len(self._open) + 1) :]

    def _begin(self, token: int, piece: bytes) -> None:
        inner = self._inner
        is_answer = inner is None or (not self._tag_only and inner.permits(token))
        tail = (self._tail + piece).lstrip()
        if tail.startswith(self._open):
            self._inner = self._later
            self._begin_thought(tail[len(self._open) :])
            return
        if not is_answer:
            self._tag_only = True
        elif inner is not None:
            inner.accept(token)
        self._tail = tail
        if not self._open.startswith(tail):
            self._place = _Place.AFTER

    def _begin_thought(self, text: bytes) -> None:
        self._place, self._tail, self._left = _Place.INSIDE, text, self._budget
        if self._budget == 0:
            self._end_budget()

    def _end_budget(self) -> None:
        """Force the message and the closing tag, or only the tag if the model has begun to write it or no message is
        set."""
        if self._ending and not any(_overlap(self._tail, way) for way in (self._closing, self._close)):
            self._forced.extend(self._ending)
        else:
            self._close_thought()

    def _close_thought(self) -> None:
        """Force the closing tag, or its rest if the model has begun to write it: only these tokens may come next."""
        ways = (self._closing, self._close)
        begun, text = max(((_overlap(self._tail, way), way) for way in ways), key=itemgetter(0))
        rest = self._tokens(text[begun:])
        if begun and b"".join(map(self._words.special_piece, rest)) != text[begun:]:
            rest = self._tokens(self._closing)
        self._forced.extend(rest)

    def _end_thought(self) -> None:
        self._place, self._tail, self._tag_only = _Place.AFTER, b"", False

    def _leaves_thought(self, token: int) -> bool:
        """Return whether a token would end the answer within the thought, or begin the answer in a way that escapes the
        constraint: by the mark of a call, or by text after the closing tag in the same token."""
        text = self._tail + self._words.special_piece(token)
        if token in self._words.eog or any(mark in text for mark in self._ends):
            return True
        _, tag, rest = text.partition(self._close)
        return bool(tag and rest.strip())

    def _furthers_tag(self, token: int) -> bool:
        piece = self._words.special_piece(token)
        rest = self._open[len(self._tail) :]
        return bool(piece) and (rest.startswith(piece) or (piece.startswith(rest) and not piece[len(rest) :].strip()))

    def _tokens(self, tag: bytes) -> list[int]:
        """Return the tokens of a tag, without the space that some vocabularies put in front of every text."""
        tokens = self._words.tokenize(tag.decode("utf-8", "ignore"), add_special=False, parse_special=True)
        return tokens[1:] if len(tokens) > 1 and self._words.special_piece(tokens[0]) == b" " else tokens

    def _only(self, token: int) -> Bits:
        bits = bits_for(self._words.num_tokens)
        bits[token >> 5] = _bit(token)
        return bits


def _overlap(text: bytes, tag: bytes) -> int:
    """Return how many bytes at the end of `text` can be the beginning of an unfinished `tag`; 0: none."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)


def _bit(token: int) -> np.uint32:
    return np.uint32(1 << (token & 31))


def _is_whole(text: bytes) -> bool:
    """Return whether the text ends with a complete UTF-8 character."""
    for length in range(1, min(4, len(text)) + 1):
        byte = text[-length]
        if byte < 0x80:
            return True
        if byte >= 0xC0:
            return length >= (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return True


def thought_before(request: GenerateRequest, prompt: Sequence[int], answers: Answers) -> Thought | None:
    """Return the bounds on the model's thought before its answer; None: no thought comes, or its marks are not known.

    Raises CallFailed: INVALID_REQUEST if the message to write when the budget is used up has the closing tag in it."""
    family, thinking = answers.family, answers.bounds_of_thought(request)
    marks = family.thought
    is_chat = request.prompt is None and request.infill is None
    if marks is None or not (is_chat or thinking.budget != UNBOUNDED):
        return None
    if fault := answers.closing_fault(thinking.message):
        name = "reasoning_budget_message"
        raise CallFailed(Failure(FailureCode.INVALID_REQUEST, f"`{name}` {fault}", name))
    is_open = answers.is_thinking(request, prompt)
    if not (is_open or answers.has_thought(request)):
        return None
    # With a form or tools, only the mark itself is forced: the form or the call says what follows the thought.
    closing = marks.close if request.tools or request.constraint else family.thought_close
    ends = family.syntax.triggers if family.calls_end_thoughts and request.tools else ()
    return Thought(
        open=marks.open.strip(),
        close=marks.close.strip(),
        closing=closing,
        ends=ends,
        is_open=is_open,
        budget=thinking.budget,
        message=thinking.message,
        again=marks.anywhere,
    )
