"""Declares the interface of all constraints, a mask that follows one answer token by token, and the errors for
constraints that can't be enforced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.protocol.events import CallFailed, Failure, FailureCode

Bits = NDArray[np.uint32]
"""One bit per token: bit t % 32 of word t // 32 is set if token t may come next."""


class MaskPending(Exception):
    """Raised by a mask that needs more time. Once `is_ready` returns True, make the same call again, before others."""

    def __init__(self, is_ready: Callable[[float], bool]) -> None:
        """`is_ready(wait_s)` returns whether to make the call again; it blocks for `wait_s` seconds at most."""
        super().__init__()
        self.is_ready = is_ready


class Mask(Protocol):
    """The mask of one answer, used by one thread at a time. Any method may raise CallFailed, and MaskPending.

    It can be used in two ways: ask for `allowed` before each token; or draw a token first, ask `permits`, and only if
    the token is refused ask for `allowed` and draw again. If tokens are drawn by their probability, both ways have the
    same result, and the second costs next to nothing for a model that keeps to the form by itself. llama-server uses
    the second."""

    @property
    def is_done(self) -> bool:
        """Whether the answer is complete: no text can follow, so no more tokens are needed."""

    def permits(self, token: int) -> bool:
        """Return whether `token` may come next."""

    def allowed(self) -> Bits | None:
        """Return the tokens that may come next; None: all. Tokens that end the answer are among them only if the answer
        may end here. The result is valid until `accept`."""

    def accept(self, token: int) -> None:
        """Take `token` as the answer's next token; from then on the mask is for the token after it."""

    def forced(self) -> Sequence[int]:
        """Return tokens of the text that must come next, where there is only one; empty if several can come, or if that
        is not known. Other tokens of the same text may be drawn as well: this is a guess at how it is spelled."""


def bits_for(num_tokens: int) -> Bits:
    return np.zeros((num_tokens + 31) // 32, dtype=np.uint32)


class Vocabulary(Protocol):
    """A model's vocabulary, as far as constraints need it."""

    num_tokens: int
    eos: int
    bos: int

    @property
    def eog(self) -> frozenset[int]:
        """The tokens that end an answer."""

    def piece(self, token: int) -> bytes:
        """Return the bytes that the token adds to an answer; empty for control tokens."""


class Unusable(ValueError):
    """Raised if a constraint can't be enforced as it stands. The message says what is wrong, why, and what to do."""


class BeyondLimits(Unusable):
    """Raised if a constraint takes too much work for a step of the engine; another process can compute its masks."""


def refused(reason: str, param: str) -> CallFailed:
    return CallFailed(Failure(FailureCode.INVALID_REQUEST, f"`{param}`: {reason}", param))


def killed() -> CallFailed:
    """Return the error for a call whose grammar's process was ended from outside."""
    message = "the process that follows the grammar was killed, for want of memory perhaps; send it again"
    return CallFailed(Failure(FailureCode.OUT_OF_MEMORY, message))


def unavailable(reason: str) -> CallFailed:
    """Return the error for a call whose grammar can't be tried or followed, through no fault of the grammar."""
    message = f"grammars can't be tried or followed on this worker now: {reason}; send it again"
    return CallFailed(Failure(FailureCode.UNAVAILABLE, message))


def broken(reason: str) -> CallFailed:
    """Return the error for a call whose constraint was compiled but can't be followed to the end of the answer."""
    return CallFailed(Failure(FailureCode.INVALID_REQUEST, f"the constraint cannot go on: {reason}"))
