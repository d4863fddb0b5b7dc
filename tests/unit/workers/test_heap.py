"""Freed memory goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading
from pathlib import Path
from workers.heap import LARGE_BYTES, keep_little

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

what, how = sys.argv[1:]
if how == "keeps little":
    assert keep_little()
kept, over = [], threading.Event()

def large():
    for size in (31, 5, 29, 7, 27, 9):
        block = bytearray(size << 20)  # frees it, which teaches the C library to keep such blocks
        del block
        blocks = [bytearray(LARGE_BYTES + (number << 16)) for number in range(8)]
        kept.append(bytearray(200_000))  # stands behind them in the arena
        del blocks

def small():
    blocks = [bytearray(2000) for _ in range(2000)]
    kept.append(bytearray(2000))
    del blocks
    done.set()
    over.wait()  # a thread that has ended would leave its arena to the next one

before = resident_mib()
for _ in range(1 if what == "large" else 12):
    done = threading.Event()
    worker = threading.Thread(target=large if what == "large" else small, daemon=True)
    worker.start()
    worker.join() if what == "large" else done.wait()
print(resident_mib() - before)
over.set()
"""
GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")


def grown_mib(what: str, how: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, what, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@GLIBC
def test_large_blocks_go_back_to_the_system() -> None:
    assert grown_mib("large", "keeps little") < 8 < 16 < grown_mib("large", "keeps all")


@GLIBC
def test_what_is_free_in_one_thread_is_there_for_the_others() -> None:
    assert grown_mib("small", "keeps little") < 16 < 24 < grown_mib("small", "keeps all")
