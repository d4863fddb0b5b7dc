"""Triggers against their plain definition, on random vocabularies and on a large one."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workers.constraint.mask import Bits
from workers.constraint.triggers import MAX_KNOWN, PieceIndex, TriggeredMask, Triggers


@dataclass
class Pieces:
    """A vocabulary that is a list."""

    pieces: Sequence[bytes]
    eos: int = -1
    bos: int = -1
    eog: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.num_tokens = len(self.pieces)

    def piece(self, token: int) -> bytes:
        return self.pieces[token]


def plainly_ruled_out(strings: Sequence[bytes], pieces: Sequence[bytes], text: bytes) -> set[int]:
    """The definition: a token may not go past a trigger, one that has begun or one that is in the token."""
    out = set()
    for token, piece in enumerate(pieces):
        for string in strings:
            ends = [string[length:] for length in range(len(string)) if text.endswith(string[:length])]
            past = any(len(piece) > len(end) and piece.startswith(end) for end in ends)
            if past or string in piece[:-1]:
                out.add(token)
    return out


def left_out(bits: Bits | None, num_tokens: int) -> set[int]:
    if bits is None:
        return set()
    flags = np.unpackbits(bits.view(np.uint8), bitorder="little", count=num_tokens)
    return set(np.flatnonzero(flags == 0).tolist())


def test_triggers_rule_out_what_their_definition_says() -> None:
    chance = random.Random(4)
    for _ in range(150):
        letters = chance.choice(["ab", "abc", "aé", "<|x>"])
        pieces = ["".join(chance.choices(letters, k=chance.randrange(7))).encode() for _ in range(chance.randrange(80))]
        controls = {token: b"<x>" for token in range(len(pieces)) if chance.random() < 0.05}
        known = [controls.get(token) or piece for token, piece in enumerate(pieces)]
        texts = ["".join(chance.choices(letters, k=chance.randrange(1, 6))) for _ in range(chance.randrange(1, 5))]
        triggers = Triggers(texts, PieceIndex(Pieces(pieces), controls))
        for _ in range(12):
            text = "".join(chance.choices(letters, k=chance.randrange(9))).encode()
            wanted = plainly_ruled_out(triggers.strings, known, text)
            assert left_out(triggers.permitted(text), len(pieces)) == wanted


def test_a_mask_that_forgets_all_but_what_has_begun_rules_out_the_same() -> None:
    chance = random.Random(5)
    for _ in range(60):
        pieces = [b"".join(chance.choices([b"a", b"b", b"-"], k=chance.randrange(1, 4))) for _ in range(30)]
        triggers = Triggers(["ab-a", "b-", "aaab"], PieceIndex(Pieces(pieces)))
        mask = TriggeredMask(triggers, lambda _: None)
        text = b""
        for _ in range(20):
            out = plainly_ruled_out(triggers.strings, pieces, text)
            assert left_out(mask.allowed(), len(pieces)) == out
            token = chance.randrange(len(pieces))
            assert mask.permits(token) == (token not in out)
            text += pieces[token]
            if triggers.found(text):
                break
            mask.accept(token)


def test_long_triggers_on_a_large_vocabulary_take_milliseconds() -> None:
    chance = random.Random(6)
    letters = [bytes([byte]) for byte in b"aaaaabcdefghij "]
    pieces = [b"".join(chance.choices(letters, k=chance.randrange(1, 12))) for _ in range(150_000)]
    index = PieceIndex(Pieces(pieces))
    texts = ["a" * (113 + n) + chance.choice("bcd") for n in range(15)] + ["a"]
    start = time.thread_time()
    triggers = Triggers(texts, index)
    for length in range(2 * MAX_KNOWN):
        triggers.permitted(b"a" * (length % 100))
    assert time.thread_time() - start < 3  # comparing each piece with each end took 49 s
    wanted = plainly_ruled_out([text.encode() for text in texts[-1:]], pieces[:2000], b"")
    assert left_out(triggers.permitted(b""), len(pieces)) & set(range(2000)) >= wanted
