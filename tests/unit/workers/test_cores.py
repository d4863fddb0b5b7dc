"""Cores by name: how they are written, how workers share them, and that a process keeps to them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.models.cores import cores_of, shares_of, text_of
from workers.settings import SettingUnusable
from workers.worker import _keep_to

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("text", "cores"),
    [("", ()), ("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), ("8,0-1", (0, 1, 8)), ("5-5", (5,)), ("127,1023", (127, 1023))],
)
def test_cores_are_named_by_number_and_range(text: str, cores: tuple[int, ...]) -> None:
    assert cores_of(text) == cores
    assert cores_of(text_of(cores)) == cores


def test_neighbours_are_written_as_a_range() -> None:
    assert text_of((9, 0, 1, 2, 4)) == "0-2,4,9"


@pytest.mark.parametrize(("text", "said"), [("3-1", "3-1 ends before it begins"), ("0-3,2", "names core 2 twice")])
def test_what_can_not_be_meant_is_told(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        cores_of(text)


def test_workers_get_neighbouring_cores_and_none_twice() -> None:
    assert shares_of(range(16), 2) == [range(8), range(8, 16)]
    shares = shares_of(cores_of("0-4,8"), 4)
    assert [list(share) for share in shares] == [[0], [1, 2], [3], [4, 8]]
    with pytest.raises(ValueError, match="names 2 cores for 3 workers, each of which needs one; name more cores"):
        shares_of((0, 1), 3)


KEPT = """
import os, subprocess, sys, threading
from workers.process.limits import keep_to_cores, num_cores

wait, ready = threading.Event(), threading.Event()
seen = []
def look():
    ready.set()
    wait.wait()
    seen.append(os.sched_getaffinity(0))
before = threading.Thread(target=look)
before.start()
ready.wait()
[core, *others] = sorted(os.sched_getaffinity(0))
assert keep_to_cores([core, 4095]) == {4095}
assert os.sched_getaffinity(0) == {core, *others}
assert keep_to_cores([core]) == frozenset()
wait.set()
before.join()
after = threading.Thread(target=look)
after.start()
after.join()
child = subprocess.check_output([sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"], text=True)
assert seen == [{core}, {core}], seen
assert child.strip() == str({core})
assert num_cores() == 1
"""


def test_a_process_keeps_to_its_cores_with_its_threads_and_children() -> None:
    """In a process of its own. A core that is not there changes nothing."""
    subprocess.run([sys.executable, "-c", KEPT], cwd=ROOT, check=True)


def test_a_core_that_is_not_there_is_told_with_those_that_are() -> None:
    there = text_of(os.sched_getaffinity(0))
    with pytest.raises(
        SettingUnusable, match=f"llama.cpus: this process may run on cores {there}, which leaves out 4095"
    ):
        _keep_to(f"{min(os.sched_getaffinity(0))},4095")
    _keep_to("")
