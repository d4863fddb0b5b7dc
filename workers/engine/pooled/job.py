"""One call of pooled work: its request, its progress, and its vectors, normalised as llama-server does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workers.engine.pooled.plan import Account, Part
from workers.llama.context import Tokens
from workers.llama.pooling import Pooling

Vectors = NDArray[np.float32]

NONE, MAX_ABSOLUTE, TAXICAB, EUCLIDEAN = -1, 0, 1, 2

LARGEST = 32760.0
"""Largest absolute value after normalising with `MAX_ABSOLUTE`: the range of 16-bit integers."""


def normalized(vectors: Vectors, norm: int) -> Vectors:
    """Return float32 [rows, width] vectors, each row divided by its norm. A row of zeros stays as it is.

    `norm` above `EUCLIDEAN` is the p of a p-norm. A row with a value that is not a number has no numbers afterwards.
    Source: `common_embd_normalize` in common.cpp of llama.cpp.
    """
    if norm == NONE:
        return vectors
    with np.errstate(invalid="ignore"):
        return _scaled(vectors, norm)


def _scaled(vectors: Vectors, norm: int) -> Vectors:
    if norm == EUCLIDEAN:
        lengths = np.sqrt(np.square(vectors).sum(axis=1, dtype=np.float64))
    else:
        sizes = np.abs(vectors).astype(np.float64)
        largest = sizes.max(axis=1, initial=0.0)
        if norm == MAX_ABSOLUTE:
            lengths = largest / LARGEST
        else:
            # Relative to the largest, so that no power overflows or vanishes.
            relative = np.divide(sizes, largest[:, None], out=np.zeros_like(sizes), where=largest[:, None] > 0)
            lengths = largest * np.power(np.power(relative, norm).sum(axis=1), 1.0 / norm)
    factors = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    scaled: Vectors = vectors * factors.astype(np.float32)[:, None]
    return scaled


NO_SEQUENCE = -1


@dataclass(frozen=True, slots=True)
class PooledRequest:
    """One call, tokenised."""

    key: int
    """Number of the call in this engine, never used twice."""
    inputs: Sequence[Sequence[int]]
    normalize: int = 2
    """The norm, as in `workers.engine.pooled.job.normalized`; unused for scores and single tokens' vectors."""
    label: str = ""
    """Name of the call in log lines."""
    tenant: str = ""
    """Team of the caller; teams take turns."""


class Job:
    """The progress of one call. `submit` makes it on any thread; from then on it belongs to the engine's thread."""

    __slots__ = (
        *("_parts", "account", "index", "inputs", "key", "label", "lengths", "normalize", "offset", "results"),
        *("sequence", "served"),
    )

    def __init__(self, request: PooledRequest) -> None:
        self.key = request.key
        self.label = request.label
        self.account = Account(request.tenant)
        self.inputs: list[Tokens] = [np.asarray(tokens, dtype=np.int32) for tokens in request.inputs]
        self.lengths = [len(tokens) for tokens in self.inputs]
        self.normalize = request.normalize
        self.index = 0
        self.offset = 0
        self.served = 0
        self.sequence = NO_SEQUENCE
        """Sequence id of an input that is computed in parts; other inputs hold one for a step only."""
        self.results: list[Vectors] = []
        self._parts: list[Vectors] = []
        """Vectors of the parts of input `index`, as far as its pooling needs them."""

    @property
    def num_cells(self) -> int:
        """Return the KV cells that are reserved for the input in progress."""
        return self.lengths[self.index] if self.offset else 0

    def take(self, part: Part[Job], vectors: Vectors, pooling: Pooling) -> None:
        """Take the `vectors` to which a part of the next input was pooled."""
        num_tokens = part.end - part.start
        self.served += num_tokens
        self.account.served += num_tokens
        if pooling is Pooling.NONE:
            self._parts.append(vectors)
        elif pooling is Pooling.MEAN:
            if not (part.start == 0 and part.is_last):
                vectors = vectors * np.float32(num_tokens / self.lengths[part.index])
            self._parts = [self._parts[0] + vectors] if self._parts else [vectors]
        elif pooling is not Pooling.CLS or part.start == 0:
            self._parts = [vectors]
        self.offset = part.end
        if part.is_last:
            whole = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
            plain = pooling in (Pooling.NONE, Pooling.RANK)
            self.results.append(whole if plain else normalized(whole, self.normalize))
            self._parts, self.offset, self.index = [], 0, self.index + 1
