"""Finds earlier places in a text of tokens where its newest tokens, or those of another text, stood before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

MIN_MATCH = 3
"""Number of tokens that must be alike for a place to be found."""

MAX_MATCH = 32
"""Maximum length to which a match is followed back: one of this length is as good as a longer one."""

MAX_PLACES = 8
"""Maximum number of earlier places that are compared; the latest ones."""

MIN_BUCKETS_BITS = 10

Numbers = TypeVar("Numbers", int, NDArray[np.int64])

_FACTORS = (1_640_531_513, 1_540_483_477, 2_246_822_519)
_SHIFT = 14


@dataclass(frozen=True, slots=True)
class Match:
    """A place where the newest tokens stood before."""

    follow: int
    """Index of the token that followed them there."""
    length: int
    """How many tokens before that are alike: `MIN_MATCH` to `MAX_MATCH`."""


class TokenIndex:
    """A growing list of tokens, in which every run of `MIN_MATCH` tokens can be looked up in constant time.

    Takes 8 bytes for each token and 8 to 16 for its bucket. Two runs may share a bucket, so matches are compared token
    by token. `push` takes about half a microsecond."""

    __slots__ = ("_buckets", "_mask", "_previous", "tokens")

    def __init__(self, tokens: NDArray[np.int32], room: int) -> None:
        """`tokens`: the first tokens of the list. `room`: about how many more will be pushed."""
        size = 1 << max(MIN_BUCKETS_BITS, (len(tokens) + room).bit_length() + 1)
        self._mask = size - 1
        self.tokens = array("i", tokens.astype(np.int32, copy=False).tobytes())
        self._buckets = array("i", bytes(4 * size))
        """Bucket -> the index after the last run of that bucket; 0: none."""
        self._previous = array("i", bytes(4 * len(tokens)))
        """Index of a run's last token -> the index after the run before it in the same bucket; 0: none."""
        if len(tokens) >= MIN_MATCH:
            self._enter(0)

    def push(self, token: int) -> None:
        """Append a token."""
        tokens = self.tokens
        tokens.append(token)
        num_tokens = len(tokens)
        if num_tokens < MIN_MATCH:
            self._previous.append(0)
            return
        bucket = _hash(tokens[-3], tokens[-2], token) & self._mask
        self._previous.append(self._buckets[bucket])
        self._buckets[bucket] = num_tokens

    def extend(self, more: Sequence[int]) -> None:
        """Append tokens: many of them at once, in some tens of nanoseconds each."""
        start = max(0, len(self.tokens) - MIN_MATCH + 1)
        self.tokens.extend(more)
        self._previous.frombytes(bytes(4 * len(more)))
        if len(self.tokens) - start >= MIN_MATCH:
            self._enter(start)

    def repeats(self) -> Match | None:
        """Return the earlier place with the longest match of the newest tokens; of equal ones the latest."""
        return self._longest(self.tokens, self._previous[-1]) if len(self.tokens) > MIN_MATCH else None

    def find(self, recent: Sequence[int]) -> Match | None:
        """Return the place with the longest match of the end of `recent`, another text; of equal ones the latest."""
        if len(recent) < MIN_MATCH:
            return None
        return self._longest(recent, self._buckets[_hash(recent[-3], recent[-2], recent[-1]) & self._mask])

    def _longest(self, recent: Sequence[int], follow: int) -> Match | None:
        best, best_length = 0, MIN_MATCH - 1
        for _ in range(MAX_PLACES):
            if not follow:
                break
            length = self._match_length(recent, follow)
            if length > best_length:
                best, best_length = follow, length
                if length >= MAX_MATCH:
                    break
            follow = self._previous[follow - 1]
        return Match(best, best_length) if best else None

    def _match_length(self, recent: Sequence[int], follow: int) -> int:
        tokens, most = self.tokens, min(follow, len(recent), MAX_MATCH)
        for length in range(1, most + 1):
            if tokens[follow - length] != recent[-length]:
                return length - 1
        return most

    def _enter(self, start: int) -> None:
        """Enter the runs of all tokens from `start` on: at once, as a prompt may have a hundred thousand."""
        wide = np.frombuffer(self.tokens, np.int32)[start:].astype(np.int64)
        buckets = _hash(wide[:-2], wide[1:-1], wide[2:]) & self._mask
        order = np.argsort(buckets, kind="stable")
        is_same = buckets[order[1:]] == buckets[order[:-1]]
        previous, latest = np.frombuffer(self._previous, np.int32)[start:], np.frombuffer(self._buckets, np.int32)
        is_first, is_last = np.append(True, ~is_same), np.append(~is_same, True)
        first, last = order[is_first], order[is_last]
        previous[first + MIN_MATCH - 1] = latest[buckets[first]]
        previous[order[1:][is_same] + MIN_MATCH - 1] = start + order[:-1][is_same] + MIN_MATCH
        latest[buckets[last]] = start + last + MIN_MATCH


def _hash(first: Numbers, second: Numbers, third: Numbers) -> Numbers:
    """Return a number for three tokens; for arrays of tokens, an array of numbers."""
    one, two, three = _FACTORS
    return (first * one ^ second * two ^ third * three) >> _SHIFT
