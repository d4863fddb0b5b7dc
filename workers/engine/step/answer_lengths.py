"""The lengths of the last answers, from which the length of the next ones is estimated."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import accumulate

NUM_ANSWERS = 256
"""Last answers whose lengths are kept."""

QUANTILE = 0.9

FIRST_GUESS_TOKENS = 64
"""Assumed length of an answer, tokens, before any was seen."""


class AnswerLengths:
    """The one estimator of an engine. Its thread notes lengths; any thread may ask."""

    def __init__(self) -> None:
        self._answers: deque[int] = deque(maxlen=NUM_ANSWERS)
        self._table: tuple[list[int], list[int]] = ([], [0])
        """The lengths in order, and their sums: of none, of the first one, of the first two, ... Replaced whole."""

    def note(self, num_tokens: int) -> None:
        """Note an answer that has ended. Takes about 15 us."""
        self._answers.append(num_tokens)
        ordered = sorted(self._answers)
        self._table = (ordered, list(accumulate(ordered, initial=0)))

    @property
    def usual(self) -> float:
        """Return the length, tokens, that one answer in ten exceeds; 0: none was seen yet."""
        ordered, _ = self._table
        return float(ordered[int(QUANTILE * len(ordered))]) if ordered else 0.0

    def left(self, num_predicted: int, limit: int) -> float:
        """Return the tokens that an answer still takes, by those of the last answers that were longer than it is.

        `limit`: most tokens of the answer.
        """
        ordered, sums = self._table
        longer = bisect_right(ordered, num_predicted)
        count = len(ordered) - longer
        if count:
            left = (sums[-1] - sums[longer]) / count - num_predicted
        else:
            left = float(max(FIRST_GUESS_TOKENS, num_predicted))
        return min(left, limit - num_predicted)
