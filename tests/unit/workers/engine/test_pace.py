from __future__ import annotations

import pytest

from workers.engine.pace import LONGEST_STEP_S, MovePace, PrefillPace


def taught(fixed_ms: float, token_ms: float) -> PrefillPace:
    pace = PrefillPace(32, 512)
    assert pace.budget == 512
    for num_tokens in (4, 100, 8, 200, 4, 60):
        pace.note(num_tokens, (fixed_ms + num_tokens * token_ms) / 1e3)
    return pace


@pytest.mark.parametrize(
    ("fixed_ms", "token_ms", "budget"),
    [
        pytest.param(55, 5.4, 163, id="a CPU: all but a seventeenth of a step is spent on its tokens"),
        pytest.param(0, 5.4, 32, id="no fixed price: short steps cost nothing more"),
        pytest.param(300, 5.4, 500, id="a high one: as long as streams can bear"),
        pytest.param(55, 100, 32, id="never less than the least"),
        pytest.param(5, 0.05, 512, id="a GPU: never more than the most"),
    ],
)
def test_a_chunk_is_no_longer_than_it_pays(fixed_ms: float, token_ms: float, budget: int) -> None:
    assert taught(fixed_ms, token_ms).budget == pytest.approx(budget, abs=1)


def tiled(fixed_ms: float, token_ms: float) -> PrefillPace:
    pace = PrefillPace(32, 512, tile=64)
    for num_tokens in (4, 100, 8, 200, 4, 64):
        pace.note(num_tokens, (fixed_ms + num_tokens * token_ms) / 1e3)
    return pace


@pytest.mark.parametrize(
    ("fixed_ms", "token_ms", "budget"),
    [
        pytest.param(0, 5.4, 64, id="short steps cost nothing more, but rows that fill no tile do"),
        pytest.param(55, 40, 64, id="a slow device: streams wait for one tile"),
        pytest.param(55, 100, 32, id="but for no tile that takes too long"),
        pytest.param(55, 5.4, 163, id="others as without tiles"),
    ],
)
def test_a_chunk_fills_a_tile_of_rows_if_it_can(fixed_ms: float, token_ms: float, budget: int) -> None:
    assert tiled(fixed_ms, token_ms).budget == pytest.approx(budget, abs=1)


def test_the_fixed_cost_stays_known_while_a_long_prompt_gets_dearer() -> None:
    """Each chunk costs more than the one before, and no step in between only decodes."""
    pace, before = tiled(100, 6), 600
    for depth in range(0, 3000, 200):
        budget = pace.budget
        assert 64 <= budget <= before
        before = budget
        pace.note(budget, (100 + budget * (6 + depth / 500)) / 1e3)
    assert 16 * 70 / 11.2 <= pace.budget <= 16 * 100 / 11.2


def test_streams_do_not_wait_long_for_a_first_chunk_that_nobody_has_measured() -> None:
    assert PrefillPace(32, 512, tile=64).budget == 128
    assert PrefillPace(32, 32, tile=64).budget == 32


def test_dear_steps_that_fill_no_tile_do_not_make_the_next_ones_shorter() -> None:
    pace = tiled(55, 5.4)
    before, gentle, token_s = pace.budget, pace.gentle, pace.token_s
    for _ in range(10):
        pace.note(40, 4.0)
    assert pace.budget == before
    assert pace.gentle == pytest.approx(gentle, abs=64)
    assert pace.token_s > token_s, "but what a token of theirs costs is known"


@pytest.mark.parametrize(
    ("token_ms", "again", "gentle"),
    [
        pytest.param(5.4, 32, 64, id="a CPU: the least"),
        pytest.param(0.4, 50, 112, id="a small model: 20 ms, 45 ms"),
        pytest.param(0.05, 400, 900, id="a GPU"),
    ],
)
def test_what_others_need_not_wait_for_takes_little_of_a_step(token_ms: float, again: int, gentle: int) -> None:
    """What is read again, and another team's burst."""
    pace = PrefillPace(32, 512)
    assert (pace.again, pace.gentle) == (32, 512), "until it is known"
    for _ in range(4):
        pace.note(512, 512 * token_ms / 1e3)
    assert pace.again == pytest.approx(again, abs=1)
    assert pace.gentle == pytest.approx(gentle, abs=1)


def test_a_device_with_dear_steps_reads_as_much_as_a_step_costs_anyhow() -> None:
    pace = taught(fixed_ms=300, token_ms=1)
    for _ in range(20):
        for num_tokens in (4, pace.gentle):
            pace.note(num_tokens, (300 + num_tokens) / 1e3)
    assert 240 < pace.gentle <= 300


def test_it_follows_a_device_that_gets_slower() -> None:
    pace = taught(50, 5)
    before = pace.budget
    for num_tokens in (4, 100, 8, 200, 4, 60) * 10:
        pace.note(num_tokens, (50 + num_tokens * 10) / 1e3)
    assert pace.budget == pytest.approx(before / 2, abs=2)
    assert pace.token_s == pytest.approx(0.010, rel=0.1)


def test_steps_that_are_all_alike_say_nothing_of_a_fixed_price() -> None:
    pace = PrefillPace(32, 512)
    for _ in range(5):
        pace.note(100, 1.0)
    assert pace.budget == pytest.approx(LONGEST_STEP_S / 0.01, abs=1)


def test_steps_too_small_to_tell_are_passed_over() -> None:
    pace = PrefillPace(32, 512)
    pace.note(3, 10.0)
    assert pace.budget == 512


def pays(move: MovePace) -> bool:
    return move.restore_pays


def test_restoring_must_be_quicker_than_computing() -> None:
    prefill, now = PrefillPace(32, 512), [100.0]
    move = MovePace(prefill, lambda: now[0])
    assert pays(move), "until it is known"
    prefill.note(100, 0.1)
    move.note_restore(64, 0.0064)
    assert pays(move)
    assert move.rebuild_s(100, saved=True) == pytest.approx(0.01)
    assert move.rebuild_s(100, saved=False) == pytest.approx(0.1)
    move.note_restore(64, 6.4)
    assert pays(move), "one that was interrupted tells nothing"
    for _ in range(20):
        move.note_restore(64, 6.4)
    assert not pays(move)
    now[0] += 11
    assert pays(move), "it is tried again, or nobody would ever know"


def test_what_is_told_of_the_pace_does_not_jump_with_a_short_prompt() -> None:
    pace = PrefillPace(32, 512)
    assert pace.steady_s == 0
    for _ in range(30):
        pace.note(512, 0.512)
    pace.note(32, 0.16)
    assert pace.token_s > 0.002
    assert 0.001 <= pace.steady_s < 0.0011
    for _ in range(60):
        pace.note(512, 1.024)
    assert 0.0019 < pace.steady_s <= 0.002
