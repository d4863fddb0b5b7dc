"""What every kind of constraint is behind: a mask that follows one answer token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint32]
"""Bit t % 32 of word t // 32 tells whether token t may come."""


class MaskPending(Exception):
    """The mask has no answer yet: ask the same again once `is_ready`, and meanwhile nothing else."""

    def __init__(self, is_ready: Callable[[float], bool]) -> None:
        """`is_ready(wait_s)`: whether to ask again; blocks for `wait_s` at most."""
        super().__init__()
        self.is_ready = is_ready


class Mask(Protocol):
    """One answer's own, used by one thread at a time. Anything may raise CallFailed, and MaskPending.

    It can be used in two ways. Ask for `allowed` before each token; or draw a token first and ask `permits`, and only
    if it is refused ask for `allowed` and draw again: for drawing from all tokens by their probability the result is
    the same, and a model that keeps to the form by itself costs next to nothing. llama-server does the latter.
    """

    @property
    def is_done(self) -> bool:
        """The answer is complete and nothing but its end can follow: no more tokens need to be asked for."""

    def permits(self, token: int) -> bool:
        """Whether `token` may come next."""

    def allowed(self) -> Bits | None:
        """The tokens that may come next; None: all. Valid until `accept`. End tokens only where it may end."""

    def accept(self, token: int) -> None:
        """`token` came."""


def bits_for(num_tokens: int) -> Bits:
    return np.zeros((num_tokens + 31) // 32, dtype=np.uint32)


class Vocabulary(Protocol):
    """What constraints need to know of a model's tokens."""

    num_tokens: int
    eos: int
    bos: int
    eog: frozenset[int]
    """Tokens that end an answer."""

    def piece(self, token: int) -> bytes:
        """The bytes that the token adds to an answer; empty for control tokens."""
