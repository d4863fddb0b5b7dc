"""A constraint that begins where a certain string appears in the answer; before it everything may come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from workers.constraint.failures import broken
from workers.constraint.mask import Bits, Mask, Vocabulary, bits_for

NONE: Mapping[int, bytes] = MappingProxyType({})


class Triggers:
    """Strings that switch a constraint on, with the vocabulary's tokens that would overshoot their ends.

    A token may complete a trigger, and not also begin what follows: then the rest would escape the constraint. So
    those tokens are ruled out where they would. Most vocabularies have a token for each trigger, and there are none.
    """

    def __init__(self, strings: Sequence[str], vocab: Vocabulary, controls: Mapping[int, bytes] = NONE) -> None:
        """`controls`: control tokens that triggers may be made of, with their texts."""
        self._controls = controls
        self.texts = tuple(strings)
        self.strings = tuple(string.encode() for string in strings)
        self.vocab = vocab
        self._overshooting: dict[bytes, set[int]] = defaultdict(set)
        inside: set[int] = set()
        ends = {string[start:] for string in self.strings for start in range(len(string))}
        first_bytes = {end[:1] for end in ends}
        for token in range(vocab.num_tokens):
            piece = self.piece(token)
            if piece[:1] in first_bytes:
                for end in ends:
                    if len(piece) > len(end) and piece.startswith(end):
                        self._overshooting[end].add(token)
            if any(string in piece[:-1] for string in self.strings):
                inside.add(token)
        self._inside = frozenset(inside)

    def piece(self, token: int) -> bytes:
        return self._controls.get(token) or self.vocab.piece(token)

    def ruled_out(self, text: bytes) -> frozenset[int]:
        """Tokens that may not follow `text`."""
        out = self._inside
        for string in self.strings:
            for length in range(len(string)):
                if text.endswith(string[:length]):
                    out = out.union(self._overshooting.get(string[length:], ()))
        return out

    def found(self, text: bytes) -> bytes | None:
        """The trigger that `text` ends with."""
        return next((string for string in self.strings if text.endswith(string)), None)


class TriggeredMask:
    """All tokens until a trigger has appeared, then the mask that `begin` gives for what follows it."""

    def __init__(self, triggers: Triggers, begin: Callable[[bytes], Mask | None]) -> None:
        self._triggers = triggers
        self._begin = begin
        self._inner: Mask | None = None
        self._tail = b""
        self._longest = max(map(len, triggers.strings))
        self._out = triggers.ruled_out(b"")

    @property
    def is_done(self) -> bool:
        return self._inner is not None and self._inner.is_done

    def permits(self, token: int) -> bool:
        return token not in self._out if self._inner is None else self._inner.permits(token)

    def allowed(self) -> Bits | None:
        if self._inner is not None:
            return self._inner.allowed()
        if not self._out:
            return None
        bits = ~bits_for(self._triggers.vocab.num_tokens)
        out = np.fromiter(self._out, dtype=np.uint32)
        np.bitwise_and.at(bits, out >> 5, ~(np.uint32(1) << (out & np.uint32(31))))
        return bits

    def accept(self, token: int) -> None:
        if self._inner is not None:
            self._inner.accept(token)
            return
        text = self._tail + self._triggers.piece(token)
        trigger = self._triggers.found(text)
        if trigger is not None:
            self._inner = self._begin(trigger)
            if self._inner is None:
                raise broken(f"it does not allow its own trigger {trigger.decode()!r}")
        self._tail = text[-self._longest :]
        self._out = self._triggers.ruled_out(self._tail)
