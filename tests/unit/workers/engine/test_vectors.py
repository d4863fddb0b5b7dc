from __future__ import annotations

import numpy as np
import pytest

from workers.engine.pooled.jobs import EUCLIDEAN, MAX_ABSOLUTE, NONE, TAXICAB, Vectors, normalized


def array(*rows: list[float]) -> Vectors:
    return np.array(rows, dtype=np.float32)


def test_each_norm_by_hand() -> None:
    row = array([3.0, -4.0])
    assert normalized(row, NONE).tolist() == [[3.0, -4.0]]
    assert normalized(row, EUCLIDEAN).tolist() == array([0.6, -0.8]).tolist()
    assert normalized(row, TAXICAB)[0] == pytest.approx([3 / 7, -4 / 7], rel=1e-7)
    assert normalized(row, MAX_ABSOLUTE).tolist() == [[24570.0, -32760.0]]
    assert normalized(row, 3)[0] == pytest.approx(np.array([3.0, -4.0]) / (27 + 64) ** (1 / 3), rel=1e-6)


@pytest.mark.parametrize("norm", [NONE, MAX_ABSOLUTE, TAXICAB, EUCLIDEAN, 3, 1000])
def test_rows_are_independent_and_zeros_stay(norm: int) -> None:
    rows = array([1.0, 2.0], [0.0, 0.0], [-5.0, 0.25])
    together = normalized(rows, norm)
    assert together.dtype == np.float32
    assert together.shape == rows.shape
    assert together[1].tolist() == [0.0, 0.0]
    for number in (0, 2):
        assert together[number].tolist() == normalized(rows[number : number + 1], norm)[0].tolist()


@pytest.mark.parametrize("norm", [TAXICAB, EUCLIDEAN, 3, 7])
def test_the_norm_of_what_comes_out_is_one(norm: int) -> None:
    rows = np.random.default_rng(1).normal(size=(4, 384)).astype(np.float32)
    for row in normalized(rows, norm).astype(np.float64):
        assert np.sum(np.abs(row) ** norm) ** (1 / norm) == pytest.approx(1.0, abs=1e-6)


def test_a_high_power_neither_overflows_nor_vanishes() -> None:
    for size in (1e-30, 1e30):
        assert normalized(array([size, size / 2]), 400)[0] == pytest.approx([1.0, 0.5], rel=1e-6)


@pytest.mark.parametrize("norm", [MAX_ABSOLUTE, TAXICAB, EUCLIDEAN, 3])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_a_number_stays_one_that_can_be_told(norm: int, bad: float) -> None:
    good, spoilt = normalized(array([1.0, 2.0], [bad, 2.0]), norm)
    assert np.isfinite(good).all()
    assert not np.isfinite(spoilt).all()


@pytest.mark.parametrize("norm", [TAXICAB, EUCLIDEAN, 3])
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e30, 3e38])
def test_no_row_that_32_bits_hold_is_too_small_or_too_large(norm: int, size: float) -> None:
    row = array([size, 0.0])
    with np.errstate(all="raise", under="ignore"):
        assert normalized(row, norm).tolist() == [[1.0, 0.0]]
