"""When a worker is left alone, and when it is tried again."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gateway.routing.retries import (
    FAILURES,
    FIRST_PAUSE_S,
    FORGOTTEN_S,
    JITTER,
    LONGEST_PAUSE_S,
    WINDOW_S,
    Circuits,
    State,
)

MIDDLE = 0.5
"""Luck that leaves a pause as it is."""
BOOT = "boot"


class Caller:
    """A call, which is only itself."""


def circuits(luck: float = MIDDLE) -> Circuits:
    return Circuits(lambda: luck)


def opened(at: float = 0.0, luck: float = MIDDLE) -> Circuits:
    """Its circuit has opened at that time, for the first time."""
    known = circuits(luck)
    for _ in range(FAILURES):
        known.note_failure(BOOT, at)
    return known


def admitted(known: Circuits, now: float) -> bool:
    """Whether a call that came now might go there; it does not."""
    call = Caller()
    told = known.admits(BOOT, call, now)
    known.end_trials(call)
    return told


def test_failures_in_a_row_open_it_and_the_last_one_tells_for_how_long() -> None:
    known = circuits()
    assert [known.note_failure(BOOT, float(at)) for at in range(FAILURES)] == [*[0.0] * (FAILURES - 1), FIRST_PAUSE_S]
    assert not admitted(known, FAILURES - 1)
    assert known.states(FAILURES - 1)[BOOT].state is State.OPEN


def test_a_complete_answer_between_failures_keeps_it_closed() -> None:
    known = circuits()
    for at in range(10 * FAILURES):
        known.note_failure(BOOT, at)
        if at % (FAILURES - 1) == 0:
            known.note_completion(BOOT, at)
        assert admitted(known, at)


def test_an_answer_that_only_began_does_not() -> None:
    known = circuits()
    for at in range(FAILURES):
        known.note_begin(BOOT, at)
        known.note_failure(BOOT, at)
    assert not admitted(known, FAILURES - 1)


def test_failures_far_apart_do_not_count_together() -> None:
    known = circuits()
    for number in range(10):
        assert known.note_failure(BOOT, number * WINDOW_S / (FAILURES - 1)) == 0.0


def test_after_the_pause_one_call_tries_it() -> None:
    known = opened()
    assert not admitted(known, FIRST_PAUSE_S - 0.01)
    first, second = Caller(), Caller()
    assert known.admits(BOOT, first, FIRST_PAUSE_S)
    assert known.states(FIRST_PAUSE_S)[BOOT].state is State.HALF_OPEN
    assert not known.admits(BOOT, second, FIRST_PAUSE_S)
    assert known.admits(BOOT, first, FIRST_PAUSE_S), "it may look again"


def test_a_call_that_only_looks_keeps_nobody_from_trying() -> None:
    known = opened()
    first, second = Caller(), Caller()
    assert known.admits(BOOT, first, FIRST_PAUSE_S, going=False)
    assert known.admits(BOOT, second, FIRST_PAUSE_S)
    assert not known.admits(BOOT, first, FIRST_PAUSE_S, going=False)


def test_a_call_that_goes_elsewhere_leaves_the_trial_to_the_next() -> None:
    known = opened()
    first, second = Caller(), Caller()
    assert known.admits(BOOT, first, FIRST_PAUSE_S)
    known.end_trials(first, but=BOOT)
    assert not known.admits(BOOT, second, FIRST_PAUSE_S)
    known.end_trials(first, but="another")
    assert known.admits(BOOT, second, FIRST_PAUSE_S)


def test_an_answer_closes_it_on_trial_and_a_complete_one_for_good() -> None:
    known = opened()
    assert known.admits(BOOT, Caller(), FIRST_PAUSE_S)
    known.note_begin(BOOT, FIRST_PAUSE_S)
    assert admitted(known, FIRST_PAUSE_S)
    assert known.states(FIRST_PAUSE_S)[BOOT].state is State.CLOSED
    known.note_completion(BOOT, FIRST_PAUSE_S + 1)
    assert not known.states(FIRST_PAUSE_S + 1)
    assert known.note_failure(BOOT, FIRST_PAUSE_S + 2) == 0.0


def test_one_failure_on_trial_opens_it_for_twice_as_long() -> None:
    known = opened()
    known.note_begin(BOOT, FIRST_PAUSE_S)
    assert known.note_failure(BOOT, FIRST_PAUSE_S + 1) == pytest.approx(2 * FIRST_PAUSE_S)


def test_pauses_grow_up_to_a_bound() -> None:
    known, now = opened(), 0.0
    pauses = [known.states(now)[BOOT].tried_in_s]
    for _ in range(10):
        now += pauses[-1]
        assert known.admits(BOOT, Caller(), now)
        pauses.append(known.note_failure(BOOT, now))
    assert pauses[0] == FIRST_PAUSE_S
    assert pauses[-1] == LONGEST_PAUSE_S
    assert all(after == pytest.approx(min(2 * before, LONGEST_PAUSE_S)) for before, after in pairwise(pauses))


@pytest.mark.parametrize(("luck", "factor"), [(0.0, 1 - JITTER), (1.0, 1 + JITTER)])
def test_luck_makes_a_pause_longer_or_shorter(luck: float, factor: float) -> None:
    assert opened(luck=luck).states(0.0)[BOOT].tried_in_s == pytest.approx(FIRST_PAUSE_S * factor)


def test_what_was_asked_for_before_changes_nothing_while_it_is_open() -> None:
    known = opened()
    before = known.states(0.5)
    assert known.note_failure(BOOT, 0.5) == 0.0
    known.note_begin(BOOT, 0.5)
    known.note_completion(BOOT, 0.5)
    assert known.states(0.5)[BOOT].tried_in_s == before[BOOT].tried_in_s
    assert not admitted(known, 0.5)


def test_processes_do_not_share_a_circuit_and_strangers_have_none() -> None:
    known = opened()
    assert known.admits("another", Caller(), 0.0)
    known.note_begin("another", 0.0)
    known.note_completion("another", 0.0)
    assert set(known.states(0.0)) == {BOOT}


def test_who_is_gone_is_forgotten() -> None:
    known = opened()
    known.note_failure("another", FORGOTTEN_S + FIRST_PAUSE_S + 1)
    assert set(known.states(FORGOTTEN_S)) == {"another"}
