"""Makes text of a wanted length that no cache knows yet."""

from __future__ import annotations

from itertools import accumulate
from random import Random

_TEXT = """
the of and to in is that it was for on are as with his they at be this have from or one had by word but not
what all were we when your can said there use an each which she do how their if will up other about out many
then them these so some her would make like him into time has look two more write go see number no way could
people my than first water been call who oil its now find long down day did get come made may part over new
sound take only little work know place year live me back give most very after thing our just name good
sentence man think say great where help through much before line right too mean old any same tell boy follow
came want show also around form three small set
"""
_WORDS = _TEXT.split()
_KEPT = 60_000
TOKENS_PER_WORD = 1.25
"""Tokens per word until the server has shown how it counts."""


class Words:
    """Cuts slices from one long random text. `tokens_per_word` is the server's, see `calibrated`."""

    def __init__(self, seed: int) -> None:
        chance = Random(seed)
        words = chance.choices(_WORDS, k=_KEPT)
        self.tokens_per_word = TOKENS_PER_WORD
        self._text = " ".join(words)
        self._starts = [0, *accumulate(len(word) + 1 for word in words)]

    def calibrated(self, words: int, tokens: int) -> None:
        """Set the tokens per word: the server counted `tokens` for a text of `words` words."""
        self.tokens_per_word = max(0.2, tokens / words)

    def text(self, tokens: int, chance: Random, mark: str = "") -> str:
        """Return a text of about `tokens` tokens that begins with `mark`."""
        count = max(1, round(tokens / self.tokens_per_word))
        parts = [mark] if mark else []
        while count > 0:
            piece = min(count, _KEPT // 2)
            start = chance.randrange(_KEPT - piece)
            parts.append(self._text[self._starts[start] : self._starts[start + piece] - 1])
            count -= piece
        return " ".join(parts)
