"""The demo model's byte-level BPE vocabulary: learning it, saving it, encoding with it.

The pre-tokenisation is the one that llama.cpp calls "smollm": every digit stands
alone, then the GPT-2 pattern. Merges are learnt in two stages. Stage one never
merges a space with what follows, so that a name is spelt by the same tokens after
a space, a quote or an underscore, and copying it is one simple lookup. Stage two
then joins the space to the commonest lower-case words, which keeps prose short.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import regex

PRE = "smollm"
VOCABULARY = 768
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CALLS = ("<tool_call>", "</tool_call>")
SPECIAL = CONTROL + CALLS
END_OF_TEXT, TURN_START, TURN_END = range(3)

_DIGIT = regex.compile(r"\p{N}")
_WORD = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
_SPECIAL = regex.compile("(" + "|".join(regex.escape(word) for word in SPECIAL) + ")")

Pair = tuple[str, str]


def byte_letters() -> list[str]:
    """The printable stand-in for each of the 256 byte values, as GPT-2 writes them."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, spare = [], 0x100
    for value in range(256):
        if value in plain:
            letters.append(chr(value))
        else:
            letters.append(chr(spare))
            spare += 1
    return letters


BYTES = byte_letters()
SPACE = BYTES[0x20]


def pieces(text: str) -> list[str]:
    """Split text into pre-tokens: single digits first, then the GPT-2 pattern on the rest."""
    found: list[str] = []
    start = 0
    for digit in _DIGIT.finditer(text):
        found += _WORD.findall(text[start : digit.start()])
        found.append(digit.group())
        start = digit.end()
    found += _WORD.findall(text[start:])
    return found


def _letters(piece: str) -> str:
    return "".join(BYTES[value] for value in piece.encode())


def _merged(symbols: tuple[str, ...], pair: Pair) -> tuple[str, ...]:
    """The symbols with every occurrence of the pair joined, left to right."""
    joined: list[str] = []
    at = 0
    while at < len(symbols):
        if symbols[at : at + 2] == pair:
            joined.append(symbols[at] + symbols[at + 1])
            at += 2
        else:
            joined.append(symbols[at])
            at += 1
    return tuple(joined)


def _learn_inside(words: Counter[str], count: int) -> list[Pair]:
    """Stage one: `count` merges that never touch a leading space before a letter."""
    split = {}
    for word, times in words.items():
        bare = word[1:] if word[0] == SPACE and word[1:2].isalpha() else word
        split[word] = (tuple(bare), times)
    merges: list[Pair] = []
    while len(merges) < count:
        pairs: Counter[Pair] = Counter()
        for symbols, times in split.values():
            for pair in pairwise(symbols):
                pairs[pair] += times
        # Ties fall to the pair that sorts last, so that the result depends on nothing else.
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        for word, (symbols, times) in split.items():
            if best[0] in symbols:
                split[word] = (_merged(symbols, best), times)
    return merges


def _learn_spaces(words: Counter[str], merges: list[Pair], count: int) -> list[Pair]:
    """Stage two: the space joined to the `count` commonest lower-case words that are one token."""
    tokens = {left + right for left, right in merges} | {"a", "I"}
    times: Counter[str] = Counter()
    for word, seen in words.items():
        bare = word[1:]
        if word[0] == SPACE and bare in tokens and (bare == "I" or (bare.isascii() and bare.islower())):
            times[bare] += seen
    ranked = sorted(times, key=lambda word: (-times[word], word))
    return [(SPACE, word) for word in ranked[:count]]


class Tokenizer:
    """Text to token numbers and back. Numbers: special tokens, 256 bytes, then merges in order."""

    def __init__(self, merges: list[Pair]) -> None:
        self.merges = merges
        self.tokens: list[str] = [*SPECIAL, *BYTES, *(left + right for left, right in merges)]
        self._number = {token: number for number, token in enumerate(self.tokens)}
        self._rank = {pair: rank for rank, pair in enumerate(merges)}
        self._known: dict[str, list[int]] = {}

    @classmethod
    def learn(cls, texts: Iterable[str], spaces: int = 100) -> Tokenizer:
        """Learn the vocabulary from sample texts; `spaces` merges are kept for stage two."""
        words: Counter[str] = Counter()
        for text in texts:
            for part in _SPECIAL.split(text):
                if part not in SPECIAL:
                    words.update(_letters(piece) for piece in pieces(part))
        room = VOCABULARY - len(SPECIAL) - 256
        inside = _learn_inside(words, room - spaces)
        outside = _learn_spaces(words, inside, spaces)
        if len(inside) + len(outside) != room:
            raise ValueError("the sample has too few common words to fill the vocabulary")
        return cls(inside + outside)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read merges that `save` wrote."""
        return cls([(left, right) for left, right in json.loads(path.read_text())])

    def save(self, path: Path) -> None:
        """Write the merges, which are all there is to the vocabulary."""
        path.write_text(json.dumps(self.merges, ensure_ascii=False))

    def _piece(self, piece: str) -> list[int]:
        symbols = tuple(_letters(piece))
        while len(symbols) > 1:
            best = min(pairwise(symbols), key=lambda pair: self._rank.get(pair, VOCABULARY))
            if best not in self._rank:
                break
            symbols = _merged(symbols, best)
        return [self._number[symbol] for symbol in symbols]

    def encode(self, text: str) -> list[int]:
        """Token numbers of the text; the special tokens' spellings become those tokens."""
        numbers: list[int] = []
        for part in _SPECIAL.split(text):
            if part in SPECIAL:
                numbers.append(self._number[part])
                continue
            for piece in pieces(part):
                if piece not in self._known:
                    self._known[piece] = self._piece(piece)
                numbers += self._known[piece]
        return numbers

    def decode(self, numbers: Iterable[int]) -> str:
        """The text of the token numbers, special tokens spelt out."""
        value = {letter: number for number, letter in enumerate(BYTES)}
        spelt = bytearray()
        for number in numbers:
            token = self.tokens[number]
            spelt += token.encode() if number < len(SPECIAL) else bytes(value[letter] for letter in token)
        return spelt.decode(errors="replace")
