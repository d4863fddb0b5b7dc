"""Masks that are computed here while that is quick, and from then on in a process of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from workers.constraint.guidance import Grammar, GuidanceMask
from workers.constraint.mask import Bits, Mask
from workers.protocol.events import CallFailed

SLOW_S = 0.03
"""Seconds for one question from which on other calls notice the longer step."""

MAX_SLOW = 3
"""Questions over `SLOW_S` before the mask moves: the first one on a grammar is slow, and any on a busy machine."""

Answer = TypeVar("Answer")


class Elsewhere(Protocol):
    """A grammar that is followed in a process of its own for each answer."""

    def mask(self) -> Mask: ...

    def mask_after(self, begun: bytes) -> Mask | None: ...

    def mask_after_tokens(self, begun: list[int]) -> Mask: ...

    def refused_of(self, beginnings: Sequence[bytes]) -> bytes | None: ...


class MovingGrammar:
    """A grammar that is quick at the beginning of answers. Immutable: may be used from several threads."""

    def __init__(self, here: Grammar, elsewhere: Elsewhere) -> None:
        self._here = here
        self._elsewhere = elsewhere

    def mask(self) -> MovingMask:
        return MovingMask(self._here.mask(), self._elsewhere.mask_after_tokens, [])

    def mask_after(self, begun: bytes) -> Mask | None:
        """Return a mask for what follows `begun`; None if no answer begins so."""
        mask, tokens = self._here.mask(), self._here.tokens(begun)
        if mask.feed(tokens):
            return MovingMask(mask, self._elsewhere.mask_after_tokens, tokens)
        return self._elsewhere.mask_after(begun) if mask.is_beyond_limits else None

    def refused_of(self, beginnings: Sequence[bytes]) -> bytes | None:
        """Return the first beginning that no answer begins with, if there is one. May block."""
        for begun in beginnings:
            mask = self._here.mask()
            if not mask.feed(self._here.tokens(begun)):
                return self._elsewhere.refused_of(beginnings) if mask.is_beyond_limits else begun
        return None


class MovingMask:
    """A mask that asks `here`, and once that exceeds its limits the mask that `move` makes from the tokens so far."""

    __slots__ = ("_here", "_move", "_num_slow", "_there", "_tokens")

    def __init__(self, here: GuidanceMask, move: Callable[[list[int]], Mask], begun: list[int]) -> None:
        """`begun`: tokens that `here` has accepted already."""
        self._here = here
        self._move = move
        self._there: Mask | None = None
        self._tokens = begun
        self._num_slow = 0

    @property
    def is_done(self) -> bool:
        return self._here.is_done if self._there is None else self._there.is_done

    def permits(self, token: int) -> bool:
        if self._there is None:
            permitted = self._timed(lambda: self._here.permits(token))
            if permitted or not self._here.is_beyond_limits:
                return permitted
        return self._elsewhere().permits(token)

    def allowed(self) -> Bits | None:
        if self._there is None:
            try:
                return self._timed(self._here.allowed)
            except CallFailed:
                if not self._here.is_beyond_limits:
                    raise
        return self._elsewhere().allowed()

    def accept(self, token: int) -> None:
        if self._there is None:
            try:
                self._timed(lambda: self._here.accept(token))
            except CallFailed:
                if not self._here.is_beyond_limits:
                    raise
            else:
                self._tokens.append(token)
                if self._num_slow >= MAX_SLOW and not self._here.is_done:
                    self._elsewhere()
                return
        self._elsewhere().accept(token)

    def _elsewhere(self) -> Mask:
        if self._there is None:
            self._there = self._move(self._tokens)
        return self._there

    def _timed(self, ask: Callable[[], Answer]) -> Answer:
        start = time.perf_counter()
        try:
            return ask()
        finally:
            self._num_slow += time.perf_counter() - start > SLOW_S
