"""The record of running requests: what is found in it after each kind of end."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.process_limits import full_disk
from workers.process.black_box import HALF, MAX_LABEL, BlackBox, BoxReader, describe, find, progress_of, take
from workers.settings import WorkerSettings
from workers.worker import kept_box

ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "worker-0.calls"


def labels(path: Path) -> list[str]:
    found = find(path)
    assert found is not None
    return [label for label, _ in found]


def test_it_holds_what_runs_now(path: Path) -> None:
    with BlackBox(path) as box:
        assert labels(path) == []
        for key, label in ((1, "a"), (2, "b"), (3, "c")):
            box.began(key, label)
        box.ended(2)
        box.ended(99)
        assert labels(path) == ["a", "c"]
        assert box.text().startswith("requests a (for 0.0 s), c (for 0.0 s)")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()
    assert find(path) is None


def test_the_disk_has_given_its_blocks_before_they_are_written_to(path: Path) -> None:
    """A page without one ends the process (SIGBUS) where the disk is full when a call begins."""
    with BlackBox(path):
        found = path.stat()
        assert found.st_blocks * 512 >= found.st_size > 2 * HALF


def test_nothing_is_left_of_a_box_that_the_disk_does_not_take(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        return len(data) // 2  # what a disk does that is full by then

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space left"):
        BlackBox(path)
    assert not path.exists()


def no_unlink(self: Path, missing_ok: bool = False) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def test_what_can_t_be_removed_is_read_once_nevertheless(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever a worker died on a disk that takes no writes, the requests of the first one were told as its own."""
    reader = BoxReader(path)
    BlackBox(path).began(1, "one")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", no_unlink)
        assert [label for label, _ in reader.take() or []] == ["one"]
        assert reader.take() is None
        reader.forget()
        assert take(path) is None, "a worker that finds it can't tell whether it was read"
        assert path.exists()
    reader.forget()
    assert not path.exists(), "the next worker does not find it"
    BlackBox(path).began(1, "two")
    reader.forget()
    assert [label for label, _ in reader.take() or []] == ["two"]
    assert reader.take() is None


def test_times_are_kept(path: Path) -> None:
    with BlackBox(path) as box:
        before = time.time()
        box.began(1, "a")
        [(_, began)] = find(path) or []
        assert before - 0.001 <= began <= time.time() + 0.001, "milliseconds are kept"


DYING = """
import os, pathlib, signal, sys
from workers.process.black_box import BlackBox
box = BlackBox(pathlib.Path(sys.argv[1]))
box.began(1, "one")
box.began(2, "two")
box.ended(1)
os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_it_outlives_its_process_and_is_told_once(path: Path, number: int) -> None:
    done = subprocess.run([sys.executable, "-c", DYING, path, str(int(number))], cwd=ROOT)
    assert done.returncode == -number
    assert [label for label, _ in take(path) or []] == ["two"]
    assert take(path) is None


def test_a_death_between_two_writes_leaves_a_whole_record(path: Path) -> None:
    """The half that does not count may hold anything."""
    box = BlackBox(path)
    box.began(1, "one")
    data = bytearray(path.read_bytes())
    other = 16 if data[0] == 1 else 16 + HALF
    data[other : other + HALF] = os.urandom(HALF)
    path.write_bytes(data)
    assert labels(path) == ["one"]
    box.close()


def test_a_new_box_takes_the_place_of_an_old_one(path: Path) -> None:
    old = BlackBox(path)
    old.began(1, "old")
    with BlackBox(path) as new:
        new.began(1, "new")
        assert labels(path) == ["new"]


@pytest.mark.parametrize("content", [b"", b"hello", bytes(16 + 2 * HALF)])
def test_what_is_no_record_is_none(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert find(path) is None


def test_ids_of_callers_can_not_forge_a_line(path: Path) -> None:
    with BlackBox(path) as box:
        box.began(1, "a\n1.0 forged\x1b[2J")
        box.began(2, "x" * 1000)
        box.began(3, "")
        assert labels(path) == ["a?1.0 forged?[2J", "x" * MAX_LABEL, "without an id"]


def test_more_ids_than_there_is_room_for(path: Path) -> None:
    with BlackBox(path) as box:
        for key in range(1000):
            box.began(key, f"{key:0{MAX_LABEL}d}")
        found = labels(path)
    assert 500 < len(found) < 1000
    assert found[:-1] == [f"{key:0{MAX_LABEL}d}" for key in range(len(found) - 1)]


def test_without_a_file_it_serves_its_own_process() -> None:
    box = BlackBox(None)
    assert box.text() == "no request"
    box.began(1, "a")
    assert box.text() == "request a (for 0.0 s)"
    box.close()


def test_the_longest_comes_first() -> None:
    assert describe([("young", 99.0), ("old", 90.5)], now=100.0) == "requests old (for 9.5 s), young (for 1.0 s)"


def test_a_limit_on_the_size_of_files_is_a_full_disk(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with full_disk():
        box = kept_box(WorkerSettings.model_construct(black_box=path))
    box.began(1, "one")
    assert box.text().startswith("request one")
    assert not path.exists()
    assert "no record is kept of what runs when this process dies" in caplog.text


def test_a_worker_serves_without_a_box_where_the_disk_takes_none(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    box = kept_box(WorkerSettings.model_construct(black_box=path))
    box.began(1, "one")
    assert box.text().startswith("request one")
    assert not path.exists()
    assert "no record is kept of what runs when this process dies" in caplog.text


def test_it_tells_how_much_is_loaded(path: Path) -> None:
    assert progress_of(path) is None
    with BlackBox(path) as box:
        assert progress_of(path) is None
        for share, told in ((0.0, 0.0), (0.426, 0.42), (1.0, 1.0), (1.5, 1.0), (-1.0, 0.0)):
            box.loading(share)
            assert progress_of(path) == told
        box.began(1, "a")
        assert labels(path) == ["a"], "the record of requests is as it was"
        box.loaded()
        assert progress_of(path) is None
    BlackBox(None).loading(0.5)
    path.write_bytes(bytes(100))
    assert progress_of(path) is None
