"""Makes a constraint begin once a certain string (a trigger) appears in the answer; all text before that is allowed. An
index of the vocabulary's pieces (the tokens' texts) finds the tokens that reach beyond the end of a trigger.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from workers.constraint.mask import Bits, Mask, Vocabulary, bits_for, broken

NONE: Mapping[int, bytes] = MappingProxyType({})
Tokens = NDArray[np.int64]


class PieceIndex:
    """Finds the tokens whose texts begin with a string, or contain it, without looking at each token.

    Immutable, safe to use from several threads. Making it takes 0.5 s at 150,000 tokens."""

    def __init__(self, vocab: Vocabulary, controls: Mapping[int, bytes] = NONE) -> None:
        """`controls`: control tokens that count as text, each with its text."""
        self.num_tokens = vocab.num_tokens
        self._pieces = [controls.get(token) or vocab.piece(token) for token in range(vocab.num_tokens)]
        order = sorted(range(vocab.num_tokens), key=self._pieces.__getitem__)
        self._sorted = [self._pieces[token] for token in order]
        self._order: Tokens = np.array(order, dtype=np.int64)
        lengths = np.fromiter(map(len, self._pieces), dtype=np.int64, count=vocab.num_tokens)
        self._ends = np.cumsum(lengths)
        """The position in `_text` at which each piece ends."""
        self._text = np.frombuffer(b"".join(self._pieces), dtype=np.uint8)

    def piece(self, token: int) -> bytes:
        """Return the token's text."""
        return self._pieces[token]

    def longer(self, beginning: bytes) -> Tokens:
        """Return the tokens whose texts begin with `beginning` and go on after it."""
        start = bisect_left(self._sorted, beginning)
        while start < len(self._sorted) and self._sorted[start] == beginning:
            start += 1
        return self._order[start : self._end(beginning, start)]

    def with_inside(self, string: bytes) -> Tokens:
        """Return the tokens whose texts contain `string` and go on after it."""
        text, room = self._text, len(self._text) - len(string) + 1
        places = np.flatnonzero(text[: max(0, room)] == string[0])
        for offset in range(1, len(string)):
            if not places.size:
                break
            places = places[text[places + offset] == string[offset]]
        tokens = np.searchsorted(self._ends, places, side="right")
        return np.unique(tokens[places + len(string) < self._ends[tokens]])

    def _end(self, beginning: bytes, start: int) -> int:
        """Return the position in `_sorted` after the last piece that begins with `beginning`; search from `start`."""
        low, high = start, len(self._sorted)
        length = len(beginning)
        while low < high:
            middle = (low + high) // 2
            if self._sorted[middle][:length] == beginning:
                low = middle + 1
            else:
                high = middle
        return low


MAX_KNOWN = 128
"""Maximum number of unfinished triggers whose permitted tokens are cached (20 KB each at 150,000 tokens); then the
cache is cleared."""


class Triggers:
    """Strings that switch a constraint on (triggers), and the vocabulary's tokens that go on beyond a trigger's end.

    A token overshoots if it completes a trigger and also begins the text after it, which would escape the constraint.
    Such tokens are ruled out. Most vocabularies have a token for each trigger, and no tokens that overshoot."""

    def __init__(self, strings: Sequence[str], pieces: PieceIndex) -> None:
        """Look up the tokens that go on beyond a trigger's end. Takes milliseconds, by means of the index `pieces`."""
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
        """Return the longest end of `text` that is an unfinished beginning of a trigger."""
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
                self._known.clear()  # another thread may do the same, which at worst computes one entry twice
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
    """A mask that, until a trigger has appeared, permits all tokens except those whose text would go on beyond the
    trigger's end. Then it follows the mask that `begin` makes for the text after that trigger."""

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

    def forced(self) -> Sequence[int]:
        return () if self._inner is None else self._inner.forced()

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
