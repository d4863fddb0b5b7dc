"""What is seen while it runs: on a terminal one line that is drawn anew, on a pipe plain lines."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from select import select

import pytest

from gateway.bench.connection import Tape, target
from gateway.bench.driver import Caller, Driver, Form, Span
from gateway.bench.terminal import status
from gateway.bench.workload import Replay, Words
from tests.support.timed_server import Timing, timed_server

ROOT = Path(__file__).resolve().parents[4]


async def a_driver() -> Driver:
    there = target("http://127.0.0.1:1", insecure=False)
    source = Replay((), Words(1), 1.0, 100, 1)
    driver = Driver(there, Form("m", True, None), [Caller("", "key")], source, 1.0)
    driver.run.began = 100.0
    driver.run.tapes = [Tape(100.0, error="cut"), Tape(101.0), Tape(102.0), Tape(103.0)]
    driver.run.running = {2, 3}
    return driver


async def test_the_line_of_a_run() -> None:
    driver = await a_driver()
    line = status(driver, Span(seconds=60), 115.0, 1234.4)
    assert line == "[######..................] 15/60 s, 4 sent, 2 running, 1,234 tokens/s, 1 failed"
    line = status(driver, Span(calls=8), 115.0, 0.0)
    assert line == "[######..................] 2/8 calls, 4 sent, 2 running, 0 tokens/s, 1 failed"
    driver.run.sending_ended = 114.0
    assert status(driver, Span(), 115.0, 0.0).startswith("15 s, 4 sent")
    assert "waiting for the last answers" in status(driver, Span(seconds=10), 115.0, 0.0)


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)


def test_a_terminal_has_one_line_and_the_table_after_it(terminal: tuple[int, int], tmp_path: Path) -> None:
    ours, theirs = terminal
    with timed_server(lambda number: Timing(0.3)) as server:
        command = [sys.executable, "-m", "gateway.cli", "bench", "--url", server.url, "--model", "m"]
        command += ["--concurrency", "1", "--count", "4", "--state-dir", str(tmp_path)]
        done = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, text=True)
        os.close(theirs)
        said, _ = done.communicate(timeout=60)
    drawn = ""
    while select([ours], [], [], 0)[0]:
        try:
            drawn += os.read(ours, 65536).decode()
        except OSError:
            break
    lines = drawn.split("\r\x1b[2K")
    assert sum("/4 calls, " in line for line in lines) >= 2
    assert lines[-1] == ""
    assert "\n" not in drawn
    assert said.startswith("4 of 4 calls answered")
