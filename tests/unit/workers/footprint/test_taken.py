"""What processes take of main memory, read of real ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workers.footprint.taken import num_processes, taken_bytes

MIB = 1 << 20
HOLDER = """
import os, sys
held = bytearray(b"x") * (32 << 20)
if os.fork() == 0:
    more = bytearray(b"y") * (8 << 20)
print("ready", flush=True)
sys.stdin.read()
"""

SELF = """
from workers.footprint.taken import anonymous_bytes
anonymous_bytes()
before = anonymous_bytes()
held = bytearray(b"x") * (16 << 20)
print(anonymous_bytes() - before)
"""
MAPPER = """
import mmap, sys
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
    sum(data[::4096])
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_process_knows_what_it_holds() -> None:
    """A new one is asked: the memory of this one moves by itself, as other tests' objects are freed."""
    done = subprocess.run([sys.executable, "-c", SELF], capture_output=True, text=True, check=True)
    assert 15 * MIB < int(done.stdout) < 18 * MIB


def test_children_count_and_what_they_share_counts_once() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert [process.stdout.readline(), process.stdout.readline()] == [b"ready\n"] * 2
        assert num_processes(process.pid) == 2
        taken = taken_bytes(process.pid)
        assert taken is not None
        assert 40 * MIB < taken < 60 * MIB
        process.kill()


def test_only_the_files_that_are_asked_for_count(tmp_path: Path) -> None:
    (path := tmp_path / "m.gguf").write_bytes(b"x" * (4 * MIB))
    command = [sys.executable, "-c", MAPPER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        plain, with_file = taken_bytes(process.pid), taken_bytes(process.pid, [path])
        other = taken_bytes(process.pid, [tmp_path / "other.gguf"])
        process.kill()
    assert plain is not None
    # It takes some pages more as it begins to read.
    assert with_file == pytest.approx(plain + 4 * MIB, abs=MIB // 16)
    assert other == pytest.approx(plain, abs=MIB // 16)


def test_of_a_process_that_has_ended_nothing_is_told() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert taken_bytes(process.pid) is None
    assert num_processes(process.pid) == 0
