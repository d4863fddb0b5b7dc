"""What the C library does with memory that is free again.

glibc raises its threshold for blocks that it maps one by one each time such a block is freed, up to 32 MiB. What is
below lies in a thread's arena, where it is kept: the arena of a worker that had moved states of all sizes for half an
hour held 67 MB, of which 37 were free. Each thread has an arena, up to eight for each core, and what is free in one is
of no use to the others: nine of a worker had 20 MiB free between them. A gateway that had read thirty messages of 8 MB
kept 140 MiB; with this it keeps 2. Source: mallopt(3).
"""

from __future__ import annotations

import asyncio
import ctypes

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
LARGE_BYTES = 4 << 20
"""States, and buffers of a context. Far above the logits of a step, which must not cost a system call each."""


GIVE_BACK_EVERY_S = 20.0
"""How often small blocks that are free again are looked for; it takes a thread 2 ms at most."""

NUM_ARENAS = 2
"""Threads seldom wait for each other here: what they allocate, most of them do under the interpreter's lock."""


def keep_little(large_bytes: int = LARGE_BYTES) -> bool:
    """From now on freed blocks of `large_bytes` and more go back to the system at once, and all threads share
    `NUM_ARENAS` arenas; False: not with this C library.

    For the whole process, once, before its threads begin.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    mallopt = library.mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return bool(mallopt(M_MMAP_THRESHOLD, large_bytes) and mallopt(M_ARENA_MAX, NUM_ARENAS))


def give_back_free() -> None:
    """Give what is free between blocks that are not back to the system, in some milliseconds; without the
    interpreter's lock. Source: malloc_trim(3).
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


class HeapUpkeep:
    """Gives back what many small blocks left, such as those of hundreds of connections that closed."""

    async def run(self) -> None:
        """Go on until cancelled."""
        while True:
            await asyncio.sleep(GIVE_BACK_EVERY_S)
            await asyncio.to_thread(give_back_free)
