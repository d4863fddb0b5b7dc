"""When a model that failed is tried again, and what callers are told of it."""

from __future__ import annotations

import random
import signal

import pytest

from workers.protocol.exits import Exit, in_words
from workers.supervisor.loading.history import (
    CRASHES,
    FIRST_PAUSE_S,
    JITTER,
    LONGEST_PAUSE_S,
    MOST_CHARS,
    MOST_LINES,
    STABLE_S,
    Death,
    History,
)

KILLED = Death(-signal.SIGKILL, "it said nothing")
TOO_LARGE = Death(Exit.NO_MEMORY, "/models/of/us/a b.gguf: does not fit")


def longest(low: float, high: float) -> float:
    return high


def even(low: float, high: float) -> float:
    return (low + high) / 2


def test_each_failure_in_a_row_doubles_the_pause() -> None:
    history = History("a", spread=even)
    pauses = [history.failed(TOO_LARGE, now=100.0) for _ in range(9)]
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    assert history.num_failures == 9
    history.note_loaded()
    assert history.num_failures == 0
    assert history.failed(TOO_LARGE, now=100.0) == FIRST_PAUSE_S


def test_pauses_differ_between_machines() -> None:
    pauses = {History("a", spread=random.Random(seed).uniform).failed(TOO_LARGE, 0.0) for seed in range(20)}
    assert len(pauses) == 20
    assert min(pauses) >= FIRST_PAUSE_S * (1 - JITTER)
    assert max(pauses) <= FIRST_PAUSE_S * (1 + JITTER)
    history = History("a", spread=longest)
    assert max(history.failed(TOO_LARGE, 0.0) for _ in range(50)) == LONGEST_PAUSE_S * (1 + JITTER)


def test_a_failure_is_pending_until_its_time() -> None:
    history = History("a", spread=even)
    history.failed(TOO_LARGE, now=100.0)
    failure = history.pending(104.9)
    assert failure is not None
    assert failure.not_before == 105.0
    assert history.pending(105.1) is None
    assert history.num_failures == 1, "it is told until a load succeeds"


def test_a_killed_load_is_tried_again_at_once_but_not_for_ever() -> None:
    history = History("a", spread=even)
    assert history.died_loading(KILLED, 10.0) is None
    assert history.pending(10.0) is None
    assert history.died_loading(KILLED, 11.0) == FIRST_PAUSE_S
    assert history.died_loading(KILLED, 17.0) is None
    assert history.died_loading(KILLED, 18.0) == 2 * FIRST_PAUSE_S


def test_a_worker_that_says_why_it_can_t_load_is_not_tried_at_once() -> None:
    assert History("a", spread=even).died_loading(TOO_LARGE, 10.0) == FIRST_PAUSE_S


def test_workers_that_die_again_and_again_are_a_crash_loop() -> None:
    history = History("a", spread=even)
    crash = Death(-signal.SIGSEGV, "a prompt")
    for _ in range(CRASHES - 1):
        history.note_loaded()
        assert history.died_serving(crash, 3.0, 10.0) is None
    history.note_loaded()
    assert history.died_serving(crash, 3.0, 10.0) == FIRST_PAUSE_S
    failure = history.pending(10.0)
    assert failure is not None
    assert failure.why.whole.startswith("crash loop: 3 workers in a row")
    assert "SIGSEGV" in failure.why.whole
    history.note_loaded()
    assert history.died_serving(crash, 3.0, 20.0) == 2 * FIRST_PAUSE_S, "that it loads is no remedy"
    history.note_loaded()
    assert history.died_serving(crash, STABLE_S, 900.0) is None, "it served for long"
    assert history.num_failures == 1


def test_an_admin_s_wish_is_a_new_try_once() -> None:
    history = History("a", spread=even)
    for _ in range(3):
        history.failed(TOO_LARGE, 10.0)
    history.note_asked(55.0)
    assert (history.pending(10.0), history.num_failures, history.last) == (None, 0, None)
    assert history.failed(TOO_LARGE, 10.0) == FIRST_PAUSE_S
    history.note_asked(55.0)
    assert history.pending(10.0) is not None, "the same wish"


def test_callers_are_told_no_folders() -> None:
    death = Death(Exit.BAD_MODEL, "/srv/our models/x.gguf: cut; see ~/models/notes.txt, 'http' and a/b and 3/4")
    assert "srv" not in death.why.whole
    assert "notes.txt" in death.why.whole
    assert "models/notes" not in death.why.whole
    assert death.why.whole.endswith("a/b and 3/4")
    assert Death(None, "it did nothing for 3 s").why.whole == "it did nothing for 3 s"


def test_a_log_is_bounded() -> None:
    death = Death.told(1, "x", ["y" * 10_000] * 100)
    assert len(death.lines) == MOST_LINES
    assert {len(line) for line in death.lines} == {MOST_CHARS}
    assert len(Death(1, "z" * 10_000).why.whole) < 2 * MOST_CHARS


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (71, "exit code 71 (not enough memory)"),
        (42, "exit code 42"),
        (0, "exit code 0"),
        (-9, "SIGKILL (killed, as the system does where memory runs out)"),
        (-15, "SIGTERM"),
        (-99, "signal 99"),
    ],
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    assert in_words(code) == words
