"""Learns how often drafted tokens are drawn, by where the draft comes from and how long its match is."""

from __future__ import annotations

from enum import IntEnum
from itertools import accumulate
from operator import mul

from workers.engine.speculation.token_index import MAX_MATCH


class Source(IntEnum):
    """Where a draft comes from."""

    HISTORY = 0
    """The conversation itself, prompt and answer."""
    POOL = 1
    """Earlier answers of the same scope."""
    PREDICTION = 2
    """The answer that the caller expects (OpenAI's `prediction`)."""
    FORM = 3
    """The text that the answer's grammar or schema leaves as the only one."""
    MODEL = 4
    """A second, smaller model."""


BOUNDS = (4, 6, 9, 13, 17, 25, MAX_MATCH)
"""Matches are told apart by length: shorter than the first bound, shorter than the second, ... and longest ones."""

FIRST_GUESSES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
"""Assumed hit rates of these classes before any token was drawn."""

SURE_BOUNDS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Tokens of a draft model are told apart by its own probability for them, in as many classes."""

FIRST_MODEL_RATE = 0.8
"""Assumed share of a draft model's tokens that are drawn, before any was."""

PRIOR_TRIALS, MIN_WEIGHT = 8, 0.005
"""A first guess counts as much as `PRIOR_TRIALS` tokens. `MIN_WEIGHT`: least weight of the newest token in the mean."""

_CLASS_OF = [sum(length >= bound for bound in BOUNDS) for length in range(MAX_MATCH + 1)]
_STALE_TOKENS = 64
_MODEL_WEIGHT = 0.01
_LENGTHS = (0, *BOUNDS)


def length_of(probability: float) -> int:
    """Return a length of matches that stands for a draft model's probability of a token, for `HitRates`."""
    return _LENGTHS[sum(probability >= bound for bound in SURE_BOUNDS)]


class HitRates:
    """The share of drafted tokens that were drawn. A draft that was not computed counts too: its next token is compared
    with the one that was drawn, which costs nothing. So rates are known before drafts pay."""

    def __init__(self) -> None:
        self._rates = [[list(FIRST_GUESSES) for _ in Source] for _ in range(2)]
        self._trials = [[[0] * len(FIRST_GUESSES) for _ in Source] for _ in range(2)]
        self._chances: dict[tuple[bool, int, int], list[float]] = {}
        """`chances` by its arguments, for at most `_STALE_TOKENS` more tokens."""
        self._num_noted = 0
        self.model_rates = [FIRST_MODEL_RATE, FIRST_MODEL_RATE]
        """Share of a draft model's tokens that were drawn after all before them, by whether the call is greedy."""

    def note(self, is_greedy: bool, source: Source, length: int, is_hit: bool) -> None:
        """Note whether a token was drawn that a draft after a match of `length` tokens has next."""
        number = _CLASS_OF[length]
        trials = self._trials[is_greedy][source]
        trials[number] += 1
        rates = self._rates[is_greedy][source]
        rates[number] += (is_hit - rates[number]) * max(1 / (PRIOR_TRIALS + trials[number]), MIN_WEIGHT)
        if source is Source.MODEL:
            self.model_rates[is_greedy] += (is_hit - self.model_rates[is_greedy]) * _MODEL_WEIGHT
        self._num_noted += 1
        if self._num_noted >= _STALE_TOKENS:
            self._num_noted = 0
            self._chances.clear()

    def forget_some(self, is_greedy: bool, share: float) -> None:
        """Move the draft model's rate back towards what was assumed first, by `share` of the way."""
        self.model_rates[is_greedy] += (FIRST_MODEL_RATE - self.model_rates[is_greedy]) * share

    def chance(self, is_greedy: bool, source: Source, length: int) -> float:
        """Return the chance that the token after a match of `length` tokens is drawn."""
        return self._rates[is_greedy][source][_CLASS_OF[length]]

    def chances(self, is_greedy: bool, source: Source, length: int) -> list[float]:
        """Return, for each of `MAX_MATCH` tokens after a match of `length` tokens, the chance that it and all before it
        are drawn."""
        key = (is_greedy, source, length)
        chances = self._chances.get(key)
        if chances is None:
            rates = self._rates[is_greedy][source]
            each = [rates[_CLASS_OF[min(length + ahead, MAX_MATCH)]] for ahead in range(MAX_MATCH)]
            chances = self._chances[key] = list(accumulate(each, mul))
        return chances
