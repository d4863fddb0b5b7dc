"""The table of running calls: what a killed process leaves there, and who may take it over."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.usage.running_calls import (
    MAX_ABOUT_BYTES,
    MAX_SLOTS,
    SLOTS_AT_ONCE,
    CutCall,
    FoundCalls,
    RunningCalls,
    claim_table,
    create_table,
    read_table,
)
from tests.support.small_disk import fail, failing_disk, fill, needs_loop_disks

PROCESS = """
import sys, time
from pathlib import Path
from gateway.usage.running_calls import RunningCalls, create_table
calls = RunningCalls(create_table(Path(sys.argv[1]), "p"))
calls.beat()
calls.set_last(7)
calls.set_committed(5)
ended = calls.open(b"ended")
ended.close()
ended.set_completion(99)
call = calls.open(b"about it")
call.set_prompt(30, 20, 10)
call.set_submitted(4, 1700)
number = 0
print("ready", flush=True)
while True:
    number += 1
    call.set_completion(number)
    print(number)
"""

PROCESS_ON_A_DISK = """
import sys
from pathlib import Path
from gateway.usage.running_calls import RunningCalls, create_table
calls = RunningCalls(create_table(Path(sys.argv[1]), "p"))
early = [calls.open(b"early") for _ in range(20)]
for line in sys.stdin:
    late = [calls.open(b"x" * 1900) for _ in range(300)]
    for call in (*early, *late):
        call.set_prompt(30, 20, 10)
        call.set_completion(4)
    calls.beat()
    print("no" if calls.failure is None else calls.failure.strerror, flush=True)
"""
"""Writes to all pages of its table, and says why it can't write any more."""


def found(path: Path) -> FoundCalls:
    descriptor = claim_table(path)
    assert descriptor is not None
    try:
        return read_table(descriptor)
    finally:
        os.close(descriptor)


def test_a_killed_process_leaves_its_calls_to_the_token(tmp_path: Path) -> None:
    """It says each number after storing it: what was said last is there, or the next one."""
    path, command = tmp_path / "p.calls", [sys.executable, "-c", PROCESS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as popen:
        assert popen.stdout is not None
        assert popen.stdout.readline() == b"ready\n"
        assert claim_table(path) is None, "its process lives"
        time.sleep(0.05)
        popen.send_signal(signal.SIGKILL)
        rest = popen.stdout.read().split()
    left = found(path)
    (call,) = left.calls
    assert call == CutCall(2, b"about it", 30, 20, 10, call.completion_tokens, 4, 1700)
    assert call.completion_tokens >= int(rest[-1]) > 0
    assert (left.last, left.committed) == (7, 5)
    assert abs(left.alive_at - time.time()) < 5


def test_one_process_takes_a_table_over(tmp_path: Path) -> None:
    os.close(create_table(tmp_path, "p"))
    descriptor = claim_table(tmp_path / "p.calls")
    assert descriptor is not None
    assert claim_table(tmp_path / "p.calls") is None
    (tmp_path / "p.calls").unlink()
    assert claim_table(tmp_path / "p.calls") is None
    os.close(descriptor)


def test_slots_are_used_again_and_more_are_made(tmp_path: Path) -> None:
    calls = RunningCalls(create_table(tmp_path, "p"))
    for _ in range(3 * SLOTS_AT_ONCE):
        calls.open(b"short").close()
    assert (tmp_path / "p.calls").stat().st_size < 2 * SLOTS_AT_ONCE * 2048
    running = [calls.open(f"call {number}".encode()) for number in range(3 * SLOTS_AT_ONCE)]
    for number, call in enumerate(running):
        call.set_completion(number)
    for call in running[::2]:
        call.close()
    left = read_table(os.open(tmp_path / "p.calls", os.O_RDONLY))
    expected = {f"call {number}".encode(): number for number in range(1, 3 * SLOTS_AT_ONCE, 2)}
    assert {call.about: call.completion_tokens for call in left.calls} == expected


def test_a_slot_begins_with_no_tokens(tmp_path: Path) -> None:
    calls = RunningCalls(create_table(tmp_path, "p"))
    earlier = calls.open(b"earlier")
    earlier.set_prompt(1, 2, 3)
    earlier.set_submitted(4, 5)
    earlier.set_completion(6)
    unlisted = calls.open(bytes(MAX_ABOUT_BYTES + 1))
    unlisted.set_prompt(1, 2, 3)
    unlisted.set_completion(4)
    earlier.close()
    calls.open(b"later")
    left = read_table(os.open(tmp_path / "p.calls", os.O_RDONLY))
    assert left.calls == (CutCall(3, b"later", 0, 0, 0, 0, 0, 0),)


def test_calls_beyond_the_table_go_on_without_a_slot(tmp_path: Path) -> None:
    calls = RunningCalls(create_table(tmp_path, "p"))
    running = [calls.open(b"") for _ in range(MAX_SLOTS + 10)]
    running[-1].set_completion(3)
    running[-1].close()
    assert len(read_table(os.open(tmp_path / "p.calls", os.O_RDONLY)).calls) == MAX_SLOTS


def test_calls_go_on_where_the_disk_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    calls = RunningCalls(create_table(tmp_path, "p"))
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    running = [calls.open(b"") for _ in range(SLOTS_AT_ONCE + 1)]
    running[-1].set_completion(3)
    with pytest.raises(OSError, match="No space"):
        create_table(tmp_path, "q")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.calls"]


@needs_loop_disks
@pytest.mark.parametrize("trouble", [fill, fail])
def test_a_disk_in_trouble_ends_nobody(tmp_path: Path, trouble: Callable[[Path], None]) -> None:
    """A full disk has the table's blocks already. One that the kernel has made read-only takes nothing more: a store
    into a mapped page would end the process by SIGBUS."""
    with failing_disk(tmp_path / "disk", 16) as disk:
        command = [sys.executable, "-c", PROCESS_ON_A_DISK, str(disk)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as popen:
            assert popen.stdin is not None
            assert popen.stdout is not None
            for said in ("no", *["no" if trouble is fill else os.strerror(errno.EFAULT)] * 2):
                popen.stdin.write("\n")
                popen.stdin.flush()
                assert popen.stdout.readline().strip() == said
                if said == "no":
                    trouble(disk)
            popen.stdin.close()
            assert popen.wait(10) == 0


def test_what_is_no_table_has_no_calls(tmp_path: Path) -> None:
    for name, body in {"a": b"", "b": b"short", "c": bytes(5000), "d": b"pdusage2" * 600}.items():
        (tmp_path / name).write_bytes(body)
        assert found(tmp_path / name).calls == ()
