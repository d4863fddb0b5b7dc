from __future__ import annotations

import pytest

from workers.engine.pace import TARGET_S, PrefillPace


@pytest.mark.parametrize(
    ("token_ms", "budget"),
    [
        pytest.param(6.0, int(TARGET_S / 0.006), id="a CPU"),
        pytest.param(100.0, 32, id="never less than the least"),
        pytest.param(0.05, 512, id="a GPU: never more than the most"),
    ],
)
def test_a_step_takes_as_long_as_streams_may_wait(token_ms: float, budget: int) -> None:
    pace = PrefillPace(32, 512)
    assert pace.budget == 512
    for _ in range(3):
        pace.note(200, 200 * token_ms / 1e3)
    assert pace.budget == budget


def test_it_follows_a_device_that_gets_slower() -> None:
    pace = PrefillPace(32, 512)
    pace.note(100, TARGET_S / 4)
    assert pace.budget == pytest.approx(400, abs=1)
    for _ in range(30):
        pace.note(100, TARGET_S / 2)
    assert pace.budget == pytest.approx(200, abs=1)


def test_steps_too_small_to_tell_are_passed_over() -> None:
    pace = PrefillPace(32, 512)
    pace.note(3, 10.0)
    assert pace.budget == 512
