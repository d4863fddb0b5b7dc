"""Computes masks in other processes, one process for each answer (`workers.constraint.forks`): from the answer's start
(`ForkedMask`), or once the mask has taken long in this process (`MovingMask`).

The engine's thread never waits long for such a mask: while the other process computes, the mask raises `MaskPending`,
and the call whose answer it constrains skips the engine's step.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from workers.constraint import forks
from workers.constraint.forks import Fork, Forks, Kind
from workers.constraint.gbnf import check
from workers.constraint.guidance import Grammar, GuidanceMask
from workers.constraint.mask import Bits, Mask, MaskPending, broken, killed, unavailable
from workers.constraint.thought import Words
from workers.process.helper_process import NotStarted, ProcessEnded, TookTooLong
from workers.protocol.events import CallFailed

SLOW_S = 0.03
"""A use of a mask that takes more seconds than this counts as slow: the step gets noticeably longer for all calls."""

MAX_SLOW = 3
"""Number of slow uses (`SLOW_S`) after which a mask moves to another process. More than one, since the first use of a
grammar is slow, and any use can be slow on a busy machine."""

Answer = TypeVar("Answer")


class Elsewhere(Protocol):
    """A grammar that other processes follow, one process for each answer."""

    def mask(self) -> Mask: ...

    def mask_after(self, begun: bytes) -> Mask | None: ...

    def mask_after_tokens(self, begun: list[int]) -> Mask: ...

    def refused_of(self, beginnings: Sequence[bytes]) -> bytes | None: ...


class MovingGrammar:
    """A grammar whose masks begin in this process and may move to others. Safe to use from several threads."""

    def __init__(self, here: Grammar, elsewhere: Elsewhere) -> None:
        self._here = here
        self._elsewhere = elsewhere
        self.is_beyond = False
        """Whether one mask of this grammar has exceeded the limits for a step of the engine. If so, the grammar's other
        masks leave this process, too: each would take just as long before it reached the limits."""

    def mask(self) -> Mask:
        return self._elsewhere.mask() if self.is_beyond else MovingMask(self, self._here.mask(), [])

    def moved(self, tokens: list[int]) -> Mask:
        """Return a mask, in a process of its own, for the text after these tokens. Does not block."""
        return self._elsewhere.mask_after_tokens(tokens)

    def mask_after(self, begun: bytes) -> Mask | None:
        """Return a mask for the text after `begun`; None if no answer can begin with `begun`."""
        mask, tokens = self._here.mask(), self._here.tokens(begun)
        if mask.feed(tokens):
            return MovingMask(self, mask, tokens)
        return self._elsewhere.mask_after(begun) if mask.is_beyond_limits else None

    def refused_of(self, beginnings: Sequence[bytes]) -> bytes | None:
        """Return the first of `beginnings` that no answer can begin with, or None. May block."""
        for begun in beginnings:
            mask = self._here.mask()
            if not mask.feed(self._here.tokens(begun)):
                return self._elsewhere.refused_of(beginnings) if mask.is_beyond_limits else begun
        return None


class MovingMask:
    """A mask that is computed in this process (by `here`) at first, and in another process once `here` has been slow
    MAX_SLOW times, or once any mask of the same grammar has exceeded the limits for a step of the engine."""

    __slots__ = ("_grammar", "_here", "_num_slow", "_there", "_tokens")

    def __init__(self, grammar: MovingGrammar, here: GuidanceMask, begun: list[int]) -> None:
        """`begun`: tokens that `here` has accepted already."""
        self._grammar = grammar
        self._here = here
        self._there: Mask | None = None
        self._tokens = begun
        self._num_slow = 0

    @property
    def is_done(self) -> bool:
        return self._here.is_done if self._there is None else self._there.is_done

    def permits(self, token: int) -> bool:
        if self._is_here:
            permitted = self._timed(lambda: self._here.permits(token))
            if permitted or not self._is_beyond_limits():
                return permitted
        return self._elsewhere().permits(token)

    def allowed(self) -> Bits | None:
        if self._is_here:
            try:
                return self._timed(self._here.allowed)
            except CallFailed:
                if not self._is_beyond_limits():
                    raise
        return self._elsewhere().allowed()

    def accept(self, token: int) -> None:
        if self._is_here:
            try:
                self._timed(lambda: self._here.accept(token))
            except CallFailed:
                if not self._is_beyond_limits():
                    raise
            else:
                self._tokens.append(token)
                if self._num_slow >= MAX_SLOW and not self._here.is_done:
                    self._elsewhere()
                return
        self._elsewhere().accept(token)

    def forced(self) -> Sequence[int]:
        return self._timed(self._here.forced) if self._is_here else ()

    @property
    def _is_here(self) -> bool:
        return self._there is None and not self._grammar.is_beyond

    def _is_beyond_limits(self) -> bool:
        """Return whether `here` has exceeded its limits. If so, the grammar's other masks leave this process, too."""
        self._grammar.is_beyond |= self._here.is_beyond_limits
        return self._here.is_beyond_limits

    def _elsewhere(self) -> Mask:
        if self._there is None:
            self._there = self._grammar.moved(self._tokens)
        return self._there

    def _timed(self, ask: Callable[[], Answer]) -> Answer:
        start = time.perf_counter()
        try:
            return ask()
        finally:
            self._num_slow += time.perf_counter() - start > SLOW_S


GRACE_S = 0.001
"""Seconds to wait, within a step of the engine, for a mask's process to reply: most replies take a tenth of that."""

WAIT_S = 5.0
"""Seconds to wait for a mask's process to reply while a grammar's triggers are checked, before the call can begin."""

Question = tuple[int, bytes]


class ForkedGrammars:
    """Makes grammars that other processes compile and follow. This process only checks the limits of GBNF texts."""

    def __init__(self, processes: Forks, vocab: Words) -> None:
        self._processes = processes
        self._vocab = vocab

    def compile(self, text: str) -> ForkedGrammar:
        """Return a grammar made from a GBNF text. The text must have been tried before (`Trial`). Raises Unusable."""
        check(text)
        return ForkedGrammar("gbnf", text, self._processes, self._vocab)

    def lark(self, text: str) -> ForkedGrammar:
        """Return a grammar made from a Lark text. llguidance must be able to compile the text."""
        return ForkedGrammar("lark", text, self._processes, self._vocab)


class ForkedGrammar:
    """A grammar known to compile; each of its masks gets its own process. Immutable, so several threads may use it."""

    def __init__(self, kind: Kind, text: str, processes: Forks, vocab: Words) -> None:
        self._text = json.dumps([kind, text]).encode()
        self._processes = processes
        self._vocab = vocab

    def mask(self) -> ForkedMask:
        """Return a mask for a whole answer, from its first token on. Does not block."""
        return self._mask(())

    def mask_after(self, begun: bytes) -> ForkedMask | None:
        """Return a mask for the text after `begun`; check `begun` with `refused_of` first. Does not block."""
        return self.mask_after_tokens(self._tokens(begun))

    def mask_after_tokens(self, begun: Iterable[int]) -> ForkedMask:
        """Return a mask for the text after the tokens `begun`, which must be allowed by the grammar. Does not block."""
        return self._mask(tuple(begun))

    def refused_of(self, beginnings: Sequence[bytes]) -> bytes | None:
        """Return the first of `beginnings` that no answer can begin with, or None. Blocks. Raises CallFailed."""
        try:
            self._processes.start()
        except NotStarted as error:
            raise _not_started(error) from None
        mask = self.mask()
        return next((begun for begun in beginnings if not mask.begins(self._tokens(begun))), None)

    def _mask(self, tokens: tuple[int, ...]) -> ForkedMask:
        return ForkedMask(self._processes, self._text, tokens, self._vocab.eog)

    def _tokens(self, begun: bytes) -> tuple[int, ...]:
        return tuple(self._vocab.tokenize(begun.decode(), add_special=False, parse_special=True))


class ForkedMask:
    """The mask of one answer, computed in a process of its own, which is forked when the mask is first used."""

    __slots__ = ("_answers", "_asked", "_begun", "_done", "_eog", "_fork", "_processes", "_text")

    def __init__(self, processes: Forks, text: bytes, begun: tuple[int, ...], eog: frozenset[int]) -> None:
        self._processes = processes
        self._text = text
        self._begun = begun
        self._eog = eog
        self._fork: Fork | None = None
        self._asked: deque[Question] = deque()
        """Questions to which the process has not replied yet, in the order in which they were asked."""
        self._answers: dict[Question, bytes] = {}
        """Question -> the process's reply. Emptied with each accepted token."""
        self._done = False

    @property
    def is_done(self) -> bool:
        """Whether nothing but the answer's end can follow. Raises MaskPending, CallFailed."""
        self._catch_up(GRACE_S)
        return self._done

    def permits(self, token: int) -> bool:
        """Return whether `token` may come next. Raises MaskPending, CallFailed."""
        return self._answer((forks.PERMITS, _bytes(token))) != b"\0"

    def allowed(self) -> Bits | None:
        """Return the tokens that may come next. Raises MaskPending, CallFailed."""
        bits = self._answer((forks.ALLOWED, b""))
        return np.frombuffer(bits, dtype="<u4").astype(np.uint32, copy=False) if bits else None

    def accept(self, token: int) -> None:
        """Take `token` as the answer's next token. Does not wait for the process to reply."""
        self._answers.clear()
        if token not in self._eog:
            self._ask((forks.ACCEPT, _bytes(token)))

    def forced(self) -> Sequence[int]:
        """Return nothing: asking the process would take longer than what it might spare."""
        return ()

    def begins(self, tokens: tuple[int, ...]) -> bool:
        """Return whether an answer may begin with these tokens. Blocks. Raises CallFailed."""
        question = (forks.BEGIN, _tokens(tokens))
        try:
            self._ask(question)
            self._catch_up(WAIT_S)
        except MaskPending:
            if self._fork is not None:
                self._fork.end_stuck()
            raise unavailable(f"there was no time to look at its beginning within {WAIT_S:g} s") from None
        return self._answers[question][:1] != b"\0"

    def is_ready(self, wait_s: float) -> bool:
        """Return whether the process's next reply has come, or can't come any more; blocks for `wait_s` at most."""
        return self._fork is None or self._fork.is_ready(wait_s)

    def _answer(self, question: Question) -> bytes:
        if question not in self._answers and question not in self._asked:
            self._ask(question)
        self._catch_up(GRACE_S)
        return self._answers[question]

    def _ask(self, question: Question) -> None:
        if self._fork is None:
            self._fork = self._forked()
            self._send((forks.COMPILE, self._text))
            if self._begun:
                self._send((forks.BEGIN, _tokens(self._begun)))
        self._send(question)

    def _forked(self) -> Fork:
        """Return a new process. Raises MaskPending if it can't be forked yet, CallFailed if it can't be at all."""
        try:
            process = self._processes.fork()
        except NotStarted as error:
            raise _not_started(error) from None
        if process is None:
            raise MaskPending(self._processes.is_ready)
        return process

    def _send(self, question: Question) -> None:
        assert self._fork is not None  # noqa: S101 - for the type checker
        self._fork.ask(*question)
        self._asked.append(question)

    def _catch_up(self, wait_s: float) -> None:
        """Take the replies to all questions, each within `wait_s`. Raises MaskPending if one is late, CallFailed."""
        while self._asked:
            assert self._fork is not None  # noqa: S101 - for the type checker
            try:
                answer = self._fork.take(wait_s)
            except TookTooLong:
                raise unavailable(f"there was no time to follow this one for {forks.ANSWER_S:g} s") from None
            except NotStarted as error:
                raise _not_started(error) from None
            except ProcessEnded as ended:
                if ended.killed:
                    raise killed() from None
                reason = f"the grammar has become too costly to follow ({ended}); make it less ambiguous"
                raise broken(reason) from None
            if answer is None:
                raise MaskPending(self.is_ready)
            self._note(self._asked.popleft(), *answer)

    def _note(self, question: Question, kind: int, answer: bytes) -> None:
        if kind != forks.OK:
            raise broken(answer.decode("utf-8", "replace"))
        if question[0] == forks.ACCEPT:
            self._done = answer != b"\0"
        elif question[0] in (forks.COMPILE, forks.BEGIN):
            if answer[:1] == b"\0" and question == (forks.BEGIN, _tokens(self._begun)) and self._begun:
                raise broken("it does not allow what it begins with")
            self._done = answer[1:] != b"\0"
        if question[0] not in (forks.ACCEPT, forks.COMPILE):
            self._answers[question] = answer


def _bytes(token: int) -> bytes:
    return token.to_bytes(4, "little")


def _tokens(tokens: tuple[int, ...]) -> bytes:
    return np.array(tokens, dtype="<i4").tobytes()


def _not_started(error: NotStarted) -> CallFailed:
    return unavailable(f"the process for it did not start ({error})")
