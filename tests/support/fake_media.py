"""Cells of pictures for tests that need no model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workers.engine.cache.prompt import Tokens


@dataclass(frozen=True, slots=True)
class FakeCells:
    num_cells: int
    num_positions: int
    digest: bytes
    is_causal: bool = True

    at_one_position: bool = False
    """Whether they are a picture's with M-RoPE, in a column."""

    def positions(self, first: int) -> Tokens:
        if self.at_one_position:
            rows = np.arange(first, first + self.num_cells, dtype=np.int32)
            still = np.full_like(rows, first)
            return np.stack([still, rows, still, still])
        return np.arange(first, first + self.num_cells, dtype=np.int32).reshape(1, -1)
