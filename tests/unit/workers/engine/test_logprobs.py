"""Log probabilities against a plain computation in double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from workers.engine.step.sampling import BLOCK_LOGITS, LOWEST, LogSoftmax


def plain(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - float(logits[np.isfinite(logits)].max())
    result: NDArray[np.float64] = shifted - math.log(np.exp(shifted).sum())
    return result


@pytest.mark.parametrize("num_tokens", [1, 5, BLOCK_LOGITS, BLOCK_LOGITS + 1, 768, 5000, 151_936])
@pytest.mark.parametrize("count", [0, 1, 5, 20, 100])
def test_the_likeliest_tokens_in_order(num_tokens: int, count: int) -> None:
    random = np.random.default_rng(num_tokens + count)
    logits = (random.normal(size=num_tokens) * 6).astype(np.float32)
    chosen = int(random.integers(num_tokens))
    expected = plain(logits)
    of_chosen, likeliest = LogSoftmax(num_tokens).take(logits, chosen, count)
    assert of_chosen == pytest.approx(float(expected[chosen]), abs=1e-4)
    best = np.argsort(-logits, kind="stable")[: min(count, num_tokens)]
    assert [token for token, _ in likeliest] == best.tolist()
    assert [logprob for _, logprob in likeliest] == pytest.approx(expected[best].tolist(), abs=1e-4)


def test_one_row_leaves_nothing_behind_for_the_next() -> None:
    softmax = LogSoftmax(1000)
    random = np.random.default_rng(1)
    first, second = (random.normal(size=1000).astype(np.float32) for _ in range(2))
    softmax.take(first * 50, 3, 10)
    assert softmax.take(second, 3, 10) == LogSoftmax(1000).take(second, 3, 10)


def test_what_cannot_come_has_a_number_that_json_knows() -> None:
    logits = np.array([1.0, -np.inf, 0.0], dtype=np.float32)
    of_chosen, likeliest = LogSoftmax(3).take(logits, 1, 3)
    assert of_chosen == LOWEST
    assert [token for token, _ in likeliest] == [0, 2, 1]
    assert likeliest[2][1] == LOWEST


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([3e38, 3e38, 0.0], dtype=np.float32)
    of_chosen, _ = LogSoftmax(3).take(logits, 0, 0)
    assert of_chosen == pytest.approx(math.log(0.5))


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_have_probabilities_that_can_be_told(odd: float) -> None:
    """JSON says null in place of NaN: a gateway could not read the step, and ended the calls of all teams there."""
    logits = np.linspace(-1, 1, 100, dtype=np.float32)
    logits[5] = odd
    softmax = LogSoftmax(100)
    for chosen in (5, 6):
        of_chosen, likeliest = softmax.take(logits, chosen, 3)
        told = [of_chosen, *(logprob for _, logprob in likeliest)]
        assert np.isfinite(told).all()
        assert softmax.take(np.full(100, -np.inf, dtype=np.float32), chosen, 1)[0] == LOWEST
