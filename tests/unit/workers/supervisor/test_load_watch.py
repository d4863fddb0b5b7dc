"""How far a load is, and when it counts as hung; with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.process.black_box import BlackBox
from workers.supervisor.loading.load_watch import GAP_S, LIBRARIES_BYTES, LOAD_TIMEOUT_S, LoadWatch, Signs, mapped_size

BUSY = "import sys; print(flush=True)\nwhile True: pass"
IDLE = "import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "worker-0.calls"


def started(code: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.fixture
def idle() -> Iterator[int]:
    process = started(IDLE)
    time.sleep(0.1)
    yield process.pid
    process.kill()
    process.communicate()


def test_it_tells_what_the_worker_has_recorded(record: Path, idle: int) -> None:
    watch = LoadWatch(record, 0, begun_at=100.0)
    watch.look(None, 100.3)
    assert watch.progress is None
    with BlackBox(record) as box:
        for share, now in ((0.0, 101.0), (0.42, 102.0), (0.4, 103.0), (1.0, 104.0)):
            box.loading(share)
            watch.look(idle, now)
            assert watch.progress == max(share, 0.42 if now > 102 else 0.0)


def test_a_mapped_file_counts_by_its_pages(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 4 * LIBRARIES_BYTES
    monkeypatch.setattr(Signs, "of", lambda pid: Signs(1, LIBRARIES_BYTES + size // 2, 0))
    with BlackBox(record) as box:
        box.loading(0.0)
        watch = LoadWatch(record, size, begun_at=100.0)
        watch.look(1, 101.0)
        assert watch.progress == 0.5
        small = LoadWatch(record, LIBRARIES_BYTES, begun_at=100.0)
        small.look(1, 101.0)
        assert small.progress == 0.0, "libraries alone have as many pages"


def test_a_process_that_does_nothing_hangs(record: Path, idle: int) -> None:
    watch = LoadWatch(record, 0, begun_at=100.0)
    for now in (100.5, 101.0, 102.0, 103.0):
        watch.look(idle, now)
    assert not watch.hung(3.0, 103.0)
    watch.look(idle, 104.0)
    assert watch.hung(3.0, 104.0) == "it did nothing for 3 s while it loaded"
    assert not watch.hung(0.0, 104.0)


def test_a_process_that_computes_does_not_hang_for_long(record: Path) -> None:
    process = started(BUSY)
    try:
        watch = LoadWatch(record, 0, begun_at=100.0)
        for now in (100.5, 102.0, 104.0, 106.0):
            time.sleep(0.05)
            watch.look(process.pid, now)
        assert not watch.hung(3.0, 106.0)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.05)
        for now in (107.0, 109.0, 111.0):
            watch.look(process.pid, now)
        assert watch.hung(3.0, 111.0)
    finally:
        process.kill()
        process.communicate()
    assert "made no progress for 1800 s" in watch.hung(0.0, 100.0 + LOAD_TIMEOUT_S + 1)


def test_progress_is_life_and_has_no_bound(record: Path, idle: int) -> None:
    with BlackBox(record) as box:
        watch, now = LoadWatch(record, 0, begun_at=0.0), 0.0
        for percent in range(100):
            box.loading(percent / 100)
            now += 4.0
            watch.look(idle, now)
            assert not watch.hung(3.9, now)
        for _ in range(3):
            now += 2.0
            watch.look(idle, now)
        assert watch.hung(5.0, now).endswith("with 99 % loaded")


def test_time_in_which_nobody_looked_does_not_count(record: Path, idle: int) -> None:
    """While Redis is away, or the machine sleeps."""
    watch = LoadWatch(record, 0, begun_at=0.0)
    for now in (1.0, 2.0, 3.0, 3.0 + GAP_S + 10_000):
        watch.look(idle, now)
    assert not watch.hung(3.0, now)


def test_a_process_that_is_gone_tells_nothing(record: Path) -> None:
    process = started(IDLE)
    assert Signs.of(process.pid) is not None
    process.kill()
    process.communicate()
    assert Signs.of(process.pid) is None
    assert mapped_size([record]) == 0
