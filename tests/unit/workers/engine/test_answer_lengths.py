from __future__ import annotations

import pytest

from workers.engine.pace import NUM_ANSWERS, AnswerLengths


def test_nine_answers_in_ten_are_no_longer_than_usual_and_old_ones_are_forgotten() -> None:
    lengths = AnswerLengths()
    assert lengths.usual == 0
    for number in range(1000):
        lengths.note(5000 if number < 1000 - NUM_ANSWERS else number % 100)
    assert 85 <= lengths.usual <= 93


@pytest.mark.parametrize(
    ("num_predicted", "limit", "left"),
    [
        pytest.param(60, 1000, 40, id="what those took that were longer"),
        pytest.param(200, 1000, 200, id="longer than all before it: as much again"),
        pytest.param(60, 70, 10, id="no more than its bound"),
    ],
)
def test_what_an_answer_still_takes(num_predicted: int, limit: int, left: float) -> None:
    lengths = AnswerLengths()
    for _ in range(20):
        lengths.note(100)
    assert lengths.left(num_predicted, limit) == left


def test_a_guess_comes_before_any_answer() -> None:
    assert AnswerLengths().left(0, 1000) == 64
