"""The bound on the time that tokenising the texts of one request may take."""

from __future__ import annotations

import time

from workers.protocol.events import CallFailed, Failure, FailureCode

LEAST_S = 5.0
S_PER_MIB = 4.0
"""Seconds per 2**20 characters. llama.cpp's slowest pre-tokenizers take a second for so much ordinary text, several on
a busy machine."""


def patience_s(num_chars: int) -> float:
    """Return the seconds that tokenising so many characters may take."""
    return LEAST_S + S_PER_MIB * num_chars / (1 << 20)


class Patience:
    """The bound for texts that are tokenised in sequence, each of them too short for a bound of its own."""

    def __init__(self, num_chars: int) -> None:
        self._num_chars = num_chars
        self._seconds = patience_s(num_chars)
        self._end = time.monotonic() + self._seconds

    def check(self) -> None:
        """Raise CallFailed once the time is up."""
        if time.monotonic() > self._end:
            raise too_slow(self._num_chars, self._seconds)


def too_slow(num_chars: int, seconds: float) -> CallFailed:
    """Return the error for a caller whose text takes too long."""
    message = (
        f"a text of {num_chars} characters took longer than {seconds:.1f} s to tokenise; send a shorter one, or one "
        "with fewer like characters in a row"
    )
    return CallFailed(Failure(FailureCode.INVALID_REQUEST, message))
