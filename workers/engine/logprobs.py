"""Log probabilities of a token and of the likeliest ones, from a row's logits before any sampler.

The same numbers as llama-server's: the natural logarithm of the softmax over the whole vocabulary
(`get_token_probabilities` in tools/server/server-common.cpp of llama.cpp).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

LOWEST = float(np.finfo(np.float32).min)
"""Stands for the logarithm of 0, which JSON has no number for; llama-server's choice as well."""

BLOCK = 64


class LogSoftmax:
    """Computes log probabilities, with working memory for `num_tokens` tokens. Belongs to the engine's thread."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        num_blocks = -(-num_tokens // BLOCK)
        self._scratch = np.empty(num_tokens, np.float32)
        self._padded = np.full(num_blocks * BLOCK, -np.inf, np.float32)
        self._row = self._padded[:num_tokens]
        self._blocks = self._padded.reshape(num_blocks, BLOCK)

    def take(self, logits: NDArray[np.float32], chosen: int, count: int) -> tuple[float, list[tuple[int, float]]]:
        """Return the chosen token's log probability, and the `count` likeliest tokens with theirs, best first."""
        np.copyto(self._row, logits)
        tops = self._blocks.max(axis=1)
        highest = float(tops.max())
        np.subtract(self._row, np.float32(highest), out=self._scratch)
        np.exp(self._scratch, out=self._scratch)
        log_sum = math.log(float(self._scratch.sum()))
        best = self._likeliest(tops, min(count, self.num_tokens)).tolist()
        likeliest = [(token, _bounded(float(self._row[token]) - highest - log_sum)) for token in best]
        return _bounded(float(self._row[chosen]) - highest - log_sum), likeliest

    def _likeliest(self, tops: NDArray[np.float32], count: int) -> NDArray[np.intp]:
        """Return the `count` best tokens by falling logit; all are in the `count` blocks with the highest maxima."""
        if count <= 0:
            return np.empty(0, np.intp)
        if count >= len(tops):
            return np.argsort(-self._row, kind="stable")[:count]
        blocks = np.sort(np.argpartition(tops, len(tops) - count)[len(tops) - count :])
        order = np.argsort(-self._blocks[blocks].ravel(), kind="stable")[:count]
        best: NDArray[np.intp] = blocks[order // BLOCK] * BLOCK + order % BLOCK
        return best


def _bounded(logprob: float) -> float:
    return max(logprob, LOWEST)
