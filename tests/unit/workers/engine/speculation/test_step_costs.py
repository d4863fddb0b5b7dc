"""How many drafted tokens a step computes, on made-up machines whose steps take known times."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.speculation.step_costs import MAX_CREDIT_S, MAX_DRAFTED, SHARE, RoundCosts, StepCosts

MANY_ROWS = 512


def cpu(num_rows: int) -> float:
    """Return the seconds of a step of a 0.5 B model on one core: two rows take four times as long as one."""
    return 0.0195 if num_rows == 1 else 0.06 + 0.0056 * num_rows


def gpu(num_rows: int) -> float:
    return 0.01 + 1e-5 * num_rows


def learned(seconds: float, num_calls: int = 1, num_steps: int = 5_000) -> StepCosts:
    costs = StepCosts()
    for _ in range(num_steps):
        costs.note_plain(num_calls, seconds)
    return costs


def chances(rate: float, count: int = MAX_DRAFTED) -> list[float]:
    return [rate ** (ahead + 1) for ahead in range(count)]


def test_nothing_is_drafted_before_a_step_was_measured() -> None:
    assert StepCosts().choose([chances(0.99)], 1, max_rows=MANY_ROWS) == []


def test_where_rows_cost_nothing_long_drafts_pay() -> None:
    costs = learned(gpu(1))
    costs.note_drafted(1, 33, 20, gpu(33))
    costs.note_drafted(1, 32, 20, gpu(32))
    assert costs.choose([chances(0.95)], 1, max_rows=MANY_ROWS)[0] >= 27
    assert 0 < costs.choose([chances(0.95, 5)], 1, max_rows=MANY_ROWS)[0] <= 5
    assert costs.choose([chances(0.95)], 1, max_rows=5)[0] <= 4


def test_where_rows_are_dear_only_sure_drafts_pay() -> None:
    costs = learned(cpu(1))
    for num_rows in (2, 3, 4, 5, 6, 8, 12, 16, 20, 24, 28, 32):
        costs.note_drafted(1, num_rows, num_rows, cpu(num_rows))
    assert costs.choose([chances(0.7)], 1, max_rows=MANY_ROWS) == []
    assert costs.choose([chances(0.99)], 1, max_rows=MANY_ROWS)[0] >= 23


def test_rows_go_to_the_likeliest_drafts() -> None:
    costs = learned(gpu(4), num_calls=4)
    costs.note_drafted(4, 12, 8, gpu(12))
    likely, unlikely = chances(0.9, 6), chances(0.3, 6)
    counts = costs.choose([unlikely, likely, likely], 4, max_rows=12)
    assert sum(counts) <= 8
    assert counts[1] > counts[0]
    assert counts[2] > counts[0]


def test_a_step_of_others_is_not_made_much_longer() -> None:
    costs = learned(0.1, num_calls=2)
    for num_rows in (3, 4, 5, 6, 8, 12, 16, 20, 24, 28, 32):
        costs.note_drafted(2, num_rows, num_rows, 0.15 if num_rows <= 8 else 0.25)
    assert 0 < sum(costs.choose([chances(0.99)], 2, max_rows=MANY_ROWS)) <= 6


def test_losses_stop_drafts_until_they_are_made_up_for() -> None:
    costs = learned(gpu(1))
    while costs.choose([chances(0.9)], 1, max_rows=MANY_ROWS):
        costs.note_drafted(1, 16, 1, gpu(1) * 2)
    for _ in range(int(2 / SHARE)):
        costs.note_plain(1, gpu(1))
    assert costs.choose([chances(0.9)], 1, max_rows=MANY_ROWS)


@given(st.integers(0, 2**32), st.sampled_from([cpu, gpu]), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_no_drafts_cost_more_than_their_share(seed: int, machine: object, told: float, true: float) -> None:
    """Whatever the estimates say: time for the same tokens is at most the share above that without drafts."""
    assert callable(machine)
    rng = random.Random(seed)
    costs = StepCosts()
    spent_s = num_tokens = 0.0
    for _ in range(400):
        counts = costs.choose([chances(told)], 1, max_rows=MANY_ROWS)
        if not any(counts):
            seconds, gained = machine(1), 1
            costs.note_plain(1, seconds)
        else:
            gained = 1
            while gained <= counts[0] and rng.random() < true:
                gained += 1
            seconds = machine(1 + counts[0])
            costs.note_drafted(1, 1 + counts[0], gained, seconds)
        spent_s += seconds
        num_tokens += gained
    plain_s = num_tokens * machine(1)
    assert spent_s <= plain_s * (1 + SHARE) + machine(33)
    assert costs.credit_s <= MAX_CREDIT_S


@pytest.mark.parametrize("num_calls", [1, 3])
def test_an_interrupted_step_hardly_counts(num_calls: int) -> None:
    costs = learned(0.01, num_calls)
    costs.note_plain(num_calls, 5.0)
    costs.note_drafted(num_calls, 8, 5, 5.0)
    assert costs.credit_s > -0.5


def test_of_equal_chances_the_first_calls_come_first() -> None:
    costs = learned(gpu(2), num_calls=2)
    for num_rows in (3, 4, 5, 6, 8, 12, 16, 20):
        costs.note_drafted(2, num_rows, num_rows, gpu(num_rows) if num_rows == 5 else 1.0)
    costs.credit_s = 1.0
    assert costs.choose([[0.9, 0.8, 0.7], [0.7, 0.7, 0.7]], 2, max_rows=5) == [3, 0]
    assert costs.choose([[0.7, 0.7], [0.7, 0.7]], 2, max_rows=5) == [2, 1]


def test_other_teams_hardly_wait_for_a_draft() -> None:
    costs = learned(0.01, num_calls=2)
    for num_rows in (3, 4, 5, 6, 8, 12, 16, 20, 24, 28, 32):
        costs.note_drafted(2, num_rows, num_rows, 0.012 if num_rows <= 4 else 0.02)
    assert sum(costs.choose([chances(0.99)], 2, max_rows=MANY_ROWS)) > 2
    assert 0 < sum(costs.choose([chances(0.99)], 2, max_rows=MANY_ROWS, is_shared=True)) <= 2


def test_steps_without_drafts_are_measured_again_and_again() -> None:
    costs = learned(0.04)
    num_plain = 0
    for _ in range(500):
        counts = costs.choose([chances(0.99)], 1, max_rows=MANY_ROWS)
        if counts:
            costs.note_drafted(1, 1 + counts[0], 1 + counts[0], 0.04)
        else:
            costs.note_plain(1, 0.01)
            num_plain += 1
    assert 5 <= num_plain < 100
    assert costs._plain[1].seconds < 0.03


def test_the_first_step_may_hold_more_than_a_step() -> None:
    costs = StepCosts()
    for seconds in (0.6, 0.01, 0.011):
        assert costs.choose([chances(0.99)], 1, max_rows=MANY_ROWS) == []
        costs.note_plain(1, seconds)
    assert costs._plain[1].seconds == 0.01


def test_a_draft_model_guesses_as_far_as_its_time_is_saved() -> None:
    costs = learned(gpu(1))
    for num_rows in (2, 3, 4, 5, 6, 8, 12, 16, 20, 24, 28, 32):
        costs.note_drafted(1, num_rows, num_rows, gpu(num_rows))

    def chosen(rate: float, round_s: float) -> int:
        counts = costs.choose([chances(rate, 16)], 1, max_rows=MANY_ROWS, before_s=lambda count: count * round_s)
        return sum(counts)

    quick, slow = gpu(1) / 20, gpu(1) / 2
    assert chosen(0.9, quick) > chosen(0.9, slow) > 0
    assert chosen(0.9, quick) > chosen(0.6, quick) > 0
    assert chosen(0.5, slow) == 0
    assert chosen(0.9, gpu(1)) == 0
    assert costs.least_chance(1, 8, slow) > costs.least_chance(1, 8, quick) > 0
    assert costs.saved_s(1, 7, 6, 7 * quick) > costs.saved_s(1, 7, 6, 7 * slow) > 0 > costs.saved_s(1, 7, 2, 7 * slow)


@given(st.integers(0, 2**32), st.sampled_from([cpu, gpu]), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.01, 1))
def test_no_draft_model_costs_more_than_its_share(
    seed: int, machine: object, told: float, true: float, share: float
) -> None:
    """Its time counts too, also where nothing comes of it."""
    assert callable(machine)
    rng = random.Random(seed)
    costs = StepCosts(credit_s=MAX_CREDIT_S)
    round_s = share * machine(1)
    spent_s = num_tokens = 0.0
    for _ in range(400):
        counts = costs.choose([chances(told, 16)], 1, max_rows=MANY_ROWS, before_s=lambda count: count * round_s)
        before_s = sum(counts) * round_s
        gained = 1
        if not any(counts) or rng.random() < 0.1:  # the model was less sure than was expected
            costs.note_plain(1, machine(1))
            costs.note_lost(before_s)
            seconds = machine(1)
        else:
            while gained <= counts[0] and rng.random() < true:
                gained += 1
            seconds = machine(1 + counts[0])
            costs.note_drafted(1, 1 + counts[0], gained, seconds, before_s)
        spent_s += seconds + before_s
        num_tokens += gained
    plain_s = num_tokens * machine(1)
    assert spent_s <= plain_s * (1 + SHARE) + MAX_CREDIT_S + machine(33) + 32 * round_s


def test_rounds_are_estimated_from_the_nearest() -> None:
    rounds = RoundCosts(lambda num_answers: 0.01 * num_answers)
    assert rounds.expected(3) == 0.03
    for seconds in (0.5, 0.002, 0.003, 0.002):
        rounds.note(2, seconds)
    assert rounds.expected(2) == pytest.approx(0.002)
    assert rounds.expected(1) == pytest.approx(0.002)
    assert 0.002 < rounds.expected(4) < 0.004
    rounds.note(4, 0.01)
    assert rounds.expected(4) == 0.01
