"""Freed memory goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading
from pathlib import Path
from workers.heap import LARGE_BYTES, give_large_blocks_back

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

if sys.argv[1] == "given back":
    assert give_large_blocks_back()
kept = []

def work():
    for size in (31, 5, 29, 7, 27, 9):
        block = bytearray(size << 20)  # frees it, which teaches the C library to keep such blocks
        del block
        blocks = [bytearray(LARGE_BYTES + (number << 16)) for number in range(8)]
        kept.append(bytearray(200_000))  # stands behind them in the arena
        del blocks

worker = threading.Thread(target=work)
before = resident_mib()
worker.start()
worker.join()
print(resident_mib() - before)
"""


def grown_mib(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_large_blocks_go_back_to_the_system() -> None:
    assert grown_mib("given back") < 8 < 16 < grown_mib("kept")
