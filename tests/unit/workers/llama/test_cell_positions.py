"""Positions of cells where pictures take fewer positions than cells, as with M-RoPE."""

from __future__ import annotations

import pytest

from workers.llama.memory import CellPositions

PICTURES = CellPositions([(3, 12, 4), (20, 6, 3)])
"""Cells 0 to 2 are text, 3 to 14 a picture of 4 positions, 15 to 19 text, 20 to 25 a picture of 3, then text."""


@pytest.mark.parametrize(
    ("cell", "position", "last", "whole"),
    [
        (0, 0, None, 0),
        (1, 1, 0, 1),
        (3, 3, 2, 3),
        (4, 7, 3, 15),
        (14, 7, 3, 15),
        (15, 7, 3, 15),
        (16, 8, 7, 16),
        (20, 12, 11, 20),
        (21, 15, 12, 26),
        (26, 15, 12, 26),
        (30, 19, 18, 30),
    ],
)
def test_positions(cell: int, position: int, last: int | None, whole: int) -> None:
    assert PICTURES.position(cell) == position
    assert PICTURES.whole(cell) == whole
    if last is not None:
        assert PICTURES.last(cell) == last, "of so many first cells"
