"""Draws a token for a chain that begins with top-k, handing it the k likeliest tokens instead of the whole vocabulary.

`llama_sampler_sample` lists the whole vocabulary for each token, 1.8 MB at 152k tokens, of which top-k keeps 40 by
default. Finding these first reads the logits once and writes nothing of that size.
"""

from __future__ import annotations

import ctypes

import numpy as np
from llama_cpp import llama_cpp as c
from numpy.typing import NDArray

from workers.llama.native import gil_calls
from workers.llama.sampling.candidates import TOKEN_DATA, Logits

MOST_K = 256
"""Maximum k for which the likeliest tokens are found here."""

BLOCK = 64
"""Tokens of a block, of which the highest logit is found first: the k likeliest tokens are in the k highest blocks."""


class TopK:
    """Draws tokens among the likeliest, one at a time. Belongs to the thread of the context whose rows it reads."""

    def __init__(self, num_tokens: int) -> None:
        self._width = num_tokens // BLOCK
        """Number of blocks. Block b has every token whose number is b modulo this, which numpy compares quickest."""
        self._starts = (np.arange(BLOCK) * self._width)[:, None]
        self._rest = np.arange(BLOCK * self._width, num_tokens)
        """Tokens of no block: they are always among those that are compared."""
        self._data = np.zeros(MOST_K, TOKEN_DATA)
        self._array = c.llama_token_data_array()
        self._reference = ctypes.byref(self._array)
        # The struct as four numbers: address, size, selected, sorted.
        self._fields = np.frombuffer(memoryview(self._array).cast("B"), dtype=np.int64)
        self._address = int(self._data.ctypes.data)
        self._apply, self._accept = gil_calls().sampler_apply, gil_calls().sampler_accept

    def draw(self, chain: int, logits: Logits, k: int) -> int | None:
        """Return the token that `llama_sampler_sample` would draw, and have the chain accept it. Top-k with this `k`
        must be the chain's first stage.

        None, and nothing is drawn, if the k likeliest tokens are not determined or not in a determined order: if some
        logits are equal or not numbers, or the vocabulary is too small to be worth it."""
        likeliest = self._likeliest(logits, k)
        if likeliest is None:
            return None
        tokens, values = likeliest
        data = self._data[:k]
        data["id"], data["logit"], data["p"] = tokens, values, 0.0
        self._fields[:] = (self._address, k, -1, 1)
        self._apply(chain, self._reference)
        address, _, selected, _ = self._fields.tolist()
        token = int(self._data["id"][(address - self._address) // TOKEN_DATA.itemsize + selected])
        self._accept(chain, token)
        return token

    def _likeliest(self, logits: Logits, k: int) -> tuple[NDArray[np.intp], Logits] | None:
        """Return the k likeliest tokens, best first, and their logits. They are found with the one that comes next, so
        that a tie with it is seen."""
        width, count = self._width, k + 1
        if width <= count:
            return None
        highest = logits[: BLOCK * width].reshape(BLOCK, width).max(axis=0)
        blocks = np.argpartition(highest, width - count)[width - count :]
        tokens = (self._starts + blocks).ravel()
        if len(self._rest):
            tokens = np.concatenate((tokens, self._rest))
        values = logits[tokens]
        best = np.argpartition(values, len(values) - count)[len(values) - count :]
        best = best[np.argsort(-values[best])]
        values = values[best]
        if not (values[:-1] > values[1:]).all():
            return None
        return tokens[best[:k]], values[:k]
