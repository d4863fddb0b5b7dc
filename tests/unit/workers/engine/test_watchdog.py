"""When a step counts as hung, and how a process that hangs ends: with real hangs, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from workers.engine.watchdog import IDLE, StepAge, Watchdog
from workers.protocol.exits import Exit

ROOT = Path(__file__).parents[4]


def test_a_step_ages_while_it_is_looked_at() -> None:
    age = StepAge(longest_look_s=2.0)
    assert [age.look(now, 10.0) for now in (10.5, 11.5, 12.5)] == [0.5, 1.5, 2.5]
    assert age.look(13.0, 12.9) == pytest.approx(0.1)
    assert age.look(14.0, IDLE) == 0.0
    assert age.look(15.0, 14.5) == 0.5


def test_time_in_which_the_process_was_frozen_does_not_count() -> None:
    age = StepAge(longest_look_s=2.0)
    assert age.look(10.0, 9.5) == 0.5
    assert age.look(3610.0, 9.5) == 2.5
    assert age.look(3611.0, 9.5) == 3.5
    assert StepAge(2.0).look(3610.0, 9.5) == 2.0


def test_many_short_steps_are_no_long_one() -> None:
    ended = threading.Event()
    watchdog = Watchdog(0.1, end=lambda _: ended.set())
    with watchdog:
        until = time.monotonic() + 0.4
        while time.monotonic() < until:
            watchdog.step_began()
            time.sleep(0.01)
            watchdog.step_ended()
        assert not ended.is_set()
        watchdog.step_began()
        assert ended.wait(5.0)


def test_an_idle_engine_and_a_bound_of_zero_are_left_alone() -> None:
    ended = threading.Event()
    for bound_s in (0.05, 0.0):
        with Watchdog(bound_s, end=lambda _: ended.set()) as watchdog:
            watchdog.step_began()
            if bound_s:
                watchdog.step_ended()
            assert not ended.wait(0.2)


def test_a_step_is_over_its_bound_while_it_runs() -> None:
    unbound = Watchdog()
    unbound.step_began()
    over: list[float] = []
    watchdog = Watchdog(0.2, end=lambda age_s: over.append(watchdog.hung_s()))
    assert watchdog.hung_s() == 0.0
    watchdog.step_began()
    with watchdog:
        assert watchdog.hung_s() == 0.0
        time.sleep(0.5)
        assert len(over) == 1
        assert 0.0 <= over[0] < 0.2
        watchdog.step_ended()
        assert watchdog.hung_s() == unbound.hung_s() == 0.0


def test_a_step_is_not_over_its_bound_for_a_time_in_which_nobody_looked() -> None:
    """As after SIGCONT: the first probe may come before the first look."""
    watchdog = Watchdog(0.05)  # not started: as a process that is frozen
    watchdog.step_began()
    time.sleep(0.2)
    assert watchdog.hung_s() == 0.0


HANGING = """
import ctypes, pathlib, sys
from workers.process.black_box import BlackBox
from workers.engine.watchdog import Watchdog
from workers.process import log_lines

log_lines.configure("info", "text")
library, path, bound_s = getattr(ctypes, sys.argv[1]), pathlib.Path(sys.argv[2]), float(sys.argv[3])
black_box = BlackBox(path)
black_box.began(1, "the-request")

def hanging_step():
    library(None).sleep(60)

with Watchdog(bound_s, black_box) as watchdog:
    watchdog.step_began()
    hanging_step()
"""


def hang(library: str, path: Path) -> tuple[int, str, float]:
    """-> exit code, what was printed, seconds. `CDLL` gives the interpreter lock away, `PyDLL` keeps it."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", HANGING, library, path, "0.3"], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    return done.returncode, done.stderr, time.monotonic() - began


def test_a_hang_in_c_ends_the_process_and_says_what_ran(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    code, said, seconds = hang("CDLL", path)
    assert code == Exit.HUNG
    assert "may take 0.3 (step_timeout_s)" in said
    assert "was running request the-request (for 0." in said
    assert "in hanging_step" in said
    assert seconds < 10
    assert path.exists(), "the supervisor reads it"


def test_a_hang_that_keeps_the_interpreter_lock_ends_the_process_too(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    code, said, seconds = hang("PyDLL", path)
    assert code == Exit.CRASHED
    assert "Timeout" in said
    assert "in hanging_step" in said
    assert seconds < 10
    assert path.exists(), "the supervisor reads it"
