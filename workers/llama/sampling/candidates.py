"""The tokens that a sampler chain chooses from, in memory of our own, filled from all or some of a row's logits.

If every token is allowed, llama.cpp fills such an array itself (`Context.sample`). Ours is for tasks that llama.cpp
does too slowly: leaving tokens out beforehand, or reading the probabilities afterwards.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
from llama_cpp import llama_cpp as c
from numpy.typing import NDArray

from workers.llama.native import gil_calls

Logits = NDArray[np.float32]
Words = NDArray[np.uint32]
"""A set of tokens: bit t % 32 of word t // 32 is set if token t is in it."""

MAX_SPARSE_WORDS = 512
"""Maximum words with bits set that are unpacked one by one; if a set has more, unpacking the whole set is faster."""

MOST = 0.75
"""Share of tokens. If at least so many are allowed, it is faster to copy all, then overwrite those not allowed."""

TOKEN_DATA = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])  # llama_token_data
_BIT = np.arange(32, dtype=np.uint32)


def all_tokens(num_tokens: int) -> Words:
    """Return the set of all `num_tokens` tokens; the last word's bits beyond them are 0."""
    words = np.full((num_tokens + 31) // 32, 0xFFFFFFFF, dtype=np.uint32)
    if num_tokens % 32:
        words[-1] = (1 << num_tokens % 32) - 1
    return words


def without(num_tokens: int, words: Words | None, tokens: Iterable[int]) -> Words:
    """Return a copy of the set (None: all of `num_tokens`) that lacks `tokens`."""
    left = all_tokens(num_tokens) if words is None else words.copy()
    for token in tokens:
        left[token // 32] &= ~np.uint32(1 << token % 32)
    return left


class Candidates:
    """The candidates for one token at a time, with room for a whole vocabulary. Belongs to the engine's thread."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.size = 0
        """Number of candidates: after `fill` the tokens that are allowed, after `choose` those that the chain left."""
        self._data = np.zeros(num_tokens, TOKEN_DATA)
        self._id, self._logit, self._p = self._data["id"], self._data["logit"], self._data["p"]
        self._tokens = np.arange(num_tokens, dtype=np.int32)
        self._every = all_tokens(num_tokens)
        self._allowed = np.empty_like(self._every)
        self._biased = np.empty(num_tokens, np.float32)
        self._row_type = ctypes.c_float * num_tokens
        self._array = c.llama_token_data_array()
        self._reference = ctypes.byref(self._array)
        # The struct as four numbers: address, size, selected, sorted.
        self._fields = np.frombuffer(memoryview(self._array).cast("B"), dtype=np.int64)
        self._first = self._chosen = 0
        self._address = int(self._data.ctypes.data)
        self._apply_released = c.llama_sampler_apply
        calls = gil_calls()
        self._apply, self._accept, self._logits_ith = calls.sampler_apply, calls.sampler_accept, calls.logits_ith

    def logits(self, context: int, row: int) -> Logits:
        """Return the row's logits in llama.cpp's memory: valid until the next decode, not to be written to."""
        address = self._logits_ith(context, row)
        if not address:
            raise ValueError(f"row {row} of the last batch has no logits")
        return np.frombuffer(memoryview(self._row_type.from_address(address)), dtype=np.float32)

    def biased(self, logits: Logits, tokens: NDArray[np.int32], values: Logits) -> Logits:
        """Return a copy with `values` added to `tokens` (each at most once); valid until the next call."""
        np.copyto(self._biased, logits)
        self._biased[tokens] += values
        return self._biased

    def fill(self, logits: Logits, allowed: Words | None = None, permitted: Words | None = None) -> int:
        """Take the tokens that are in both sets (None: all); return how many. 0: there is nothing to draw from."""
        if allowed is None and permitted is None:
            return self._fill_all(logits)
        words = self._both(allowed, permitted)
        size = int(np.bitwise_count(words).sum())
        if size == self.num_tokens:
            return self._fill_all(logits)
        open_words = np.flatnonzero(words)
        if len(open_words) <= MAX_SPARSE_WORDS:
            return self._fill_with(logits, _opened(words, open_words))
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=self.num_tokens).view(np.bool_)
        if size < self.num_tokens * MOST:
            return self._fill_with(logits, np.flatnonzero(bits))
        return self._fill_all_but(logits, bits, size)

    def choose(self, chain: int, *, slow: bool = False) -> int:
        """Return the token that the sampler chain at `chain` chooses from the candidates; there must be at least one.

        The chain does not accept the token yet. `slow`: release the interpreter lock meanwhile."""
        fields = self._fields
        fields[:] = (self._address, self.size, -1, 0)
        (self._apply_released if slow else self._apply)(chain, self._reference)
        address, self.size, selected, _ = fields.tolist()
        self._first = (address - self._address) // TOKEN_DATA.itemsize
        self._chosen = self._first + selected
        return int(self._id[self._chosen])

    def accept(self, chain: int, token: int) -> None:
        """Tell the chain that `token` is part of the answer, so that its stages can allow for it."""
        self._accept(chain, token)

    def probability(self) -> float:
        """Return the chain's probability of the token just chosen; a chain whose last stage is greedy gives none."""
        return float(self._p[self._chosen])

    def likeliest(self, count: int) -> list[tuple[int, float]]:
        """Return up to `count` candidates by falling probability, none of probability 0. Call it after `choose`."""
        end = self._first + self.size
        tokens, p = self._id[self._first : end], self._p[self._first : end]
        if 0 < count < len(p):
            part = np.argpartition(p, len(p) - count)[len(p) - count :]
            tokens, p = tokens[part], p[part]
        best = np.argsort(-p, kind="stable")[:count]
        return [(token, p) for token, p in zip(tokens[best].tolist(), p[best].tolist(), strict=True) if p > 0]

    def _both(self, allowed: Words | None, permitted: Words | None) -> Words:
        words = self._allowed
        np.copyto(words, self._every if permitted is None else permitted)
        if allowed is not None:
            known = min(len(words), len(allowed))
            words[:known] &= allowed[:known]
            words[known:] = 0
        return words

    def _fill_all(self, logits: Logits) -> int:
        np.copyto(self._id, self._tokens)
        np.copyto(self._logit, logits)
        self.size = self.num_tokens
        return self.size

    def _fill_with(self, logits: Logits, tokens: NDArray[np.intp]) -> int:
        self.size = len(tokens)
        self._id[: self.size] = tokens
        self._logit[: self.size] = logits.take(tokens)
        return self.size

    def _fill_all_but(self, logits: Logits, allowed: NDArray[np.bool_], size: int) -> int:
        """Take the `size` allowed tokens: copy all tokens, then move the last allowed ones to the others' places."""
        self._fill_all(logits)
        holes = np.flatnonzero(~allowed[:size])
        last = np.flatnonzero(allowed[size:]) + size
        self._id[holes] = last
        self._logit[holes] = logits[last]
        self.size = size
        return size


def _opened(words: Words, numbers: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the tokens whose bits are set in the words with the indices `numbers`, in rising order."""
    rows, bits = np.nonzero(words[numbers, None] >> _BIT & np.uint32(1))
    return numbers[rows] * 32 + bits
