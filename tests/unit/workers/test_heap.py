"""Freed memory goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading
from pathlib import Path
from workers.process.limits import LARGE_BYTES, keep_little

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


HELD_BY_CONNECTIONS = """
import asyncio, ctypes, sys
import psutil
from workers.process import limits

library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
limits.GIVE_BACK_EVERY_S = 0.05
rss = lambda: psutil.Process().memory_info().rss

async def main():
    blocks = [library.malloc(4096) for _ in range(10_000)]
    for block in blocks:
        ctypes.memset(block, 1, 4096)
    last = library.malloc(4096)  # what stays on top keeps all below it from the system
    full = rss()
    for block in blocks:
        library.free(block)
    kept = rss()
    upkeep = asyncio.create_task(limits.HeapUpkeep().run())
    await asyncio.sleep(0.5)
    print(full, kept, rss())

asyncio.run(main())
"""


@GLIBC
def test_small_blocks_that_are_free_go_back_now_and_then() -> None:
    done = subprocess.run([sys.executable, "-c", HELD_BY_CONNECTIONS], capture_output=True, text=True, check=True)
    full, kept, after = (int(word) for word in done.stdout.split())
    assert full - kept < 8 << 20, "nothing is tested where the C library gives it back by itself"
    assert after < full - (24 << 20)


IN_A_RING = """
import asyncio, gc
from workers.process import limits

limits.GIVE_BACK_EVERY_S = 0.05
gc.disable()
freed = []

class Prompt:
    def __del__(self):
        freed.append("prompt")

def refuse(prompt):
    try:
        raise ValueError
    except ValueError as error:
        failure = error
    return failure

async def main():
    refuse(Prompt())
    held = not freed
    upkeep = asyncio.create_task(limits.HeapUpkeep().run())
    await asyncio.sleep(0.5)
    print(held, freed)

asyncio.run(main())
"""


def test_what_an_error_holds_that_knows_itself_is_freed_in_a_quiet_process() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_RING], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1) == ["True", "['prompt']\n"]


AFTER_A_CROWD = (
    IN_A_RING.partition("async def main")[0]
    + """
limits.COLLECT_FACTOR = 1e9

async def main():
    crowd = [[] for _ in range(200_000)]
    upkeep = asyncio.create_task(limits.HeapUpkeep().run())
    await asyncio.sleep(0.3)
    refuse(Prompt())
    await asyncio.sleep(0.3)
    held = not freed
    crowd.clear()
    await asyncio.sleep(0.3)
    print(held, freed)

asyncio.run(main())
"""
)


def test_the_collector_runs_early_in_a_process_that_has_become_smaller() -> None:
    """A gateway that hundreds of calls had left kept 17 MiB of their cycles for four minutes."""
    done = subprocess.run([sys.executable, "-c", AFTER_A_CROWD], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1) == ["True", "['prompt']\n"]
