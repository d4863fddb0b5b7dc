"""A constraint that begins where a certain string appears in the answer; before that all text is allowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from workers.constraint.failures import broken
from workers.constraint.mask import Bits, Mask, bits_for
from workers.constraint.piece_index import PieceIndex, Tokens

MAX_KNOWN = 128
"""Most beginnings of triggers for which the permitted tokens are remembered: 20 KB each at 150,000 tokens."""


class Triggers:
    """Strings that switch a constraint on, with the vocabulary's tokens that would overshoot their ends.

    A token may complete a trigger but not also begin the text after it, which would escape the constraint. So such
    tokens are ruled out there. Most vocabularies have a token for each trigger, and no such tokens.
    """

    def __init__(self, strings: Sequence[str], pieces: PieceIndex) -> None:
        """Look up the tokens; takes milliseconds, since the pieces are not compared one by one."""
        self.texts = tuple(strings)
        self.strings = tuple(string.encode() for string in strings)
        self.pieces = pieces
        ends = {string[start:] for string in self.strings for start in range(len(string))}
        self._overshooting = {end: tokens for end in ends if (tokens := pieces.longer(end)).size}
        self._inside = np.concatenate([pieces.with_inside(string) for string in self.strings])
        self._begun = frozenset(string[:length] for string in self.strings for length in range(len(string)))
        self._longest = max(map(len, self.strings))
        self._known: dict[bytes, Bits] = {}

    def begun(self, text: bytes) -> bytes:
        """Return the longest end of `text` that is the beginning of a trigger, and not yet all of it."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start:] in self._begun:
                return text[start:]
        return b""

    def permitted(self, text: bytes) -> Bits | None:
        """Return the tokens that may follow `text`; None: all of them. The array must not be written to."""
        begun = self.begun(text)
        if (known := self._known.get(begun)) is not None:
            return known
        permitted = _all_but(self._ruled_out(begun), self.pieces.num_tokens)
        if permitted is not None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()  # another thread may do the same, which at worst computes one twice
            self._known[begun] = permitted
        return permitted

    def found(self, text: bytes) -> bytes | None:
        """Return the trigger that `text` ends with, if any."""
        return next((string for string in self.strings if text.endswith(string)), None)

    def _ruled_out(self, begun: bytes) -> Tokens:
        overshooting = [
            self._overshooting[string[length:]]
            for string in self.strings
            for length in range(min(len(string), len(begun) + 1))
            if string[length:] in self._overshooting and begun.endswith(string[:length])
        ]
        return np.concatenate((self._inside, *overshooting))


class TriggeredMask:
    """A mask that permits all tokens until a trigger has appeared, and then follows the mask that `begin` makes."""

    def __init__(self, triggers: Triggers, begin: Callable[[bytes], Mask | None]) -> None:
        self._triggers = triggers
        self._begin = begin
        self._inner: Mask | None = None
        self._tail = b""
        self._permitted = triggers.permitted(b"")

    @property
    def is_done(self) -> bool:
        return self._inner is not None and self._inner.is_done

    def permits(self, token: int) -> bool:
        if self._inner is not None:
            return self._inner.permits(token)
        return self._permitted is None or bool(self._permitted[token >> 5] >> np.uint32(token & 31) & np.uint32(1))

    def allowed(self) -> Bits | None:
        return self._permitted if self._inner is None else self._inner.allowed()

    def accept(self, token: int) -> None:
        if self._inner is not None:
            self._inner.accept(token)
            return
        text = self._tail + self._triggers.pieces.piece(token)
        trigger = self._triggers.found(text)
        if trigger is not None:
            self._inner = self._begin(trigger)
            if self._inner is None:
                raise broken(f"it does not allow its own trigger {trigger.decode()!r}")
        self._tail = self._triggers.begun(text)
        self._permitted = self._triggers.permitted(self._tail)


def _all_but(tokens: Tokens, num_tokens: int) -> Bits | None:
    if not tokens.size:
        return None
    bits = ~bits_for(num_tokens)
    np.bitwise_and.at(bits, tokens >> 5, ~(np.uint32(1) << (tokens & 31).astype(np.uint32)))
    return bits
