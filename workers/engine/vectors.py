"""Normalising vectors as llama-server does. Source: `common_embd_normalize` in common.cpp of llama.cpp."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]

NONE, MAX_ABSOLUTE, TAXICAB, EUCLIDEAN = -1, 0, 1, 2

LARGEST = 32760.0
"""Largest absolute value after normalising with `MAX_ABSOLUTE`: the range of 16-bit integers."""


def normalized(vectors: Vectors, norm: int) -> Vectors:
    """Return float32 [rows, width] vectors, each row divided by its norm. A row of zeros stays as it is.

    `norm` above `EUCLIDEAN` is the p of a p-norm. A row with a value that is not a number has no numbers afterwards.
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
