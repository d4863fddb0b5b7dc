"""The comparison of systems that load models on demand: what it writes for them, and what it makes of what it saw."""

from __future__ import annotations

import configparser
import time
from itertools import combinations
from pathlib import Path

import pytest

from benchmarks.models import outcome_rows, storm, swaps, table
from benchmarks.models.calls import LONG, Answer
from benchmarks.models.files import LATE, MANUAL, SIX
from benchmarks.models.scenarios import POINTS, Outcome, all_answered, in_order, told
from benchmarks.models.systems import PADDOCK_LOAD, PLACES, SERVER_LOAD, paddock_catalog, server_preset, swap_config
from benchmarks.residency.fleets import alternating

FILES = {name: Path(f"/models/{name}.gguf") for name in (*SIX, MANUAL)}


def answered(model: str, at: float, wait_s: float) -> Answer:
    return Answer(model, at, 200, at + wait_s, at + wait_s, at + wait_s, num_tokens=4)


def refused(status: int = 500) -> Answer:
    return Answer("demo", 1.0, status, ended_at=2.0, error="model limit reached")


def test_all_get_the_same_models_and_bound() -> None:
    catalog = paddock_catalog(FILES, stay_s=0.0)
    assert catalog["models_max"] == PLACES
    assert [model["name"] for model in catalog["models"] if not model["residency"]["autoload"]] == [MANUAL]  # type: ignore[attr-defined]
    preset = configparser.ConfigParser()
    preset.read_string(server_preset(FILES).removeprefix("version = 1\n"))
    assert {name: preset[name]["model"] for name in preset.sections()} == {
        name: str(path) for name, path in FILES.items()
    }
    matrix = swap_config(Path("start"), {**FILES, LATE: Path("late.gguf")})["matrix"]
    assert isinstance(matrix, dict)
    allowed = {frozenset(matrix["vars"][var] for var in pair.split(" & ")) for pair in matrix["sets"].values()}
    assert allowed == {frozenset(pair) for pair in combinations([*FILES, LATE], PLACES)}


def test_loads_are_read_from_logs() -> None:
    said = "paddock: demo is loaded: 1 call waits for demo, the oldest for 0.1 s\npaddock: demo leaves: idle for 3 s\n"
    assert PADDOCK_LOAD.findall(said) == ["demo"]
    assert SERVER_LOAD.findall("srv load: spawning server instance with name=wide on port 123\n") == ["wide"]


def test_calls_are_told_by_what_became_of_them() -> None:
    assert (answered("demo", 1.0, 0.5).is_answered, refused().is_answered) == (True, False)
    assert refused().outcome == "refused with 500 after 1.0 s (model limit reached)"
    hung = Answer("demo", time.monotonic() - 9.0)
    assert hung.outcome == "hung for 9 s"
    mixed = [answered("demo", 1.0, 0.5), answered("window", 1.0, 2.0), refused()]
    assert told(mixed) == "2 of 3 answered, the last after 2.0 s; refused with 500 after 1.0 s (model limit reached)"
    assert (all_answered(mixed), all_answered(mixed[:2])) == (False, True)
    assert in_order(mixed[:2])
    assert not in_order([answered("demo", 1.0, 5.0), answered("window", 1.3, 0.5)])


def test_a_stream_that_ran_to_its_end_is_not_a_broken_one() -> None:
    assert Answer("wide", 1.0, 200, 2.0, 3.0, num_tokens=5).is_unbroken
    assert not Answer("wide", 1.0, 200, 2.0, 3.0, ended_at=4.0, num_tokens=5).is_unbroken
    assert Answer("wide", 1.0, 200, 2.0, 3.0, ended_at=4.0, num_tokens=LONG).is_unbroken


def test_only_paddock_is_held_to_the_points() -> None:
    seen = {("lru", "paddock"): Outcome("fine", False), ("lru", "llama-server"): Outcome("a | b", False)}
    rows = outcome_rows(seen)
    assert [row.reached for row in rows] == [False, True]
    assert table(seen).splitlines()[-1] == f"| {POINTS['lru'][0]} | **no**: fine | **no**: a / b |"


def test_a_storm_is_held_to_the_planner_on_the_calls_that_were_made() -> None:
    calls = alternating(60, 0.5, 0.2)
    made = [answered(call.model, call.at, 3.0) for call in calls]
    done = storm.Storm(calls, made, num_loads=1_000, swap_s=1.0)
    answered_row, loads, p99 = storm.rows("paddock", done, has_bars=True)
    assert (answered_row.reached, loads.reached, p99.reached) == (True, False, True)
    known = storm.planned_loads(done)
    assert f"1000 / {known}; " in loads.figure
    few = storm.Storm(calls, made, num_loads=known, swap_s=1.0)
    assert storm.rows("paddock", few, has_bars=True)[1].reached
    slow = [answered(call.model, call.at, done.bound_s + 1) for call in calls]
    assert not storm.rows("paddock", storm.Storm(calls, slow, known, 1.0), has_bars=True)[2].reached
    assert all(row.reached for row in storm.rows("llama-server", done, has_bars=False))


@pytest.mark.parametrize(("swap_s", "reached"), [(0.6, True), (0.7, False)])
def test_a_swap_is_held_to_the_bare_load(swap_s: float, reached: bool) -> None:
    times = swaps.Times([0.4, 0.5, 9.0], [1.0], {"paddock": [2.0]}, {"paddock": [swap_s], "llama-server": [5.0]})
    rows = {row.what: row for row in swaps.rows("demo", times)}
    ours = rows["demo: swap, paddock"]
    assert (ours.reached, ours.ratio) == (reached, f"{swap_s / 0.5:.2f}")
    assert rows["demo: swap, llama-server"].reached
