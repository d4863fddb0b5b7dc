"""Limits that a process sets on itself: a worker, so that its crash harms nobody else and gives nothing away; a helper
process (`workers.process.helper_process`), before it reads untrusted input. Also settings of the C library's malloc, so
that freed memory goes back, and thread pools whose threads are there from the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import mmap
import os
import resource
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

STDERR = 2

OOM_SCORE = Path("/proc/self/oom_score_adj")
OOM_ADDED = 300
"""The out-of-memory score's adjustment, of 1000. A worker holds most of a machine's memory, so it ends when memory runs
out, not the Redis or gateway beside it. Any process may raise its own score. Source: proc_pid_oom_score_adj(5)."""

NO_CORE = 1
"""Bytes a core file may have. None is this small, so none is written; and 1, unlike 0, also keeps Linux from handing
the memory to a program that `core_pattern` names. Source: fs/coredump.c of Linux; core(5)."""


def isolate(*, core_dumps: bool) -> None:
    """Set a worker's limits, once, before the model is loaded; `core_dumps` leaves the limit on core files alone."""
    # The stack of the thread that got a SIGSEGV, SIGABRT or the like: functions and lines, no values.
    faulthandler.enable(file=STDERR, all_threads=False)
    # Else ggml forks this process and runs a debugger on it, whose output may hold a caller's text.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    if not core_dumps:
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        wanted = NO_CORE if sys.platform == "linux" else 0
        resource.setrlimit(resource.RLIMIT_CORE, (min(wanted, hard) if hard >= 0 else wanted, hard))
    with contextlib.suppress(OSError, ValueError):  # not Linux, or a container that forbids it
        OOM_SCORE.write_text(str(max(OOM_ADDED, int(OOM_SCORE.read_text()))))


def bound_memory(extra_bytes: int) -> None:
    """Limit the address space to what the process takes now and `extra_bytes` more. Only on Linux."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    if pages:
        limit = pages * resource.getpagesize() + extra_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def bound_cpu(seconds: int) -> None:
    """Limit CPU time to `seconds` from now, until the next call: a process that hangs ends even without a parent."""
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, resource.RLIM_INFINITY))


def shut_off() -> None:
    """Forbid this process to open files, sockets or processes; what is open stays. Import everything first.

    A process of the superuser could take these limits back.
    """
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(kind, (0, 0))


M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
LARGE_BYTES = 4 << 20
"""Bytes of a large block (states, buffers of a context). A step's logits are far smaller: they cost no system call."""


GIVE_BACK_EVERY_S = 20.0
"""Seconds between two looks for small free blocks; a look takes a thread 2 ms at most."""

COLLECT_FACTOR = 4000
"""Share of the time, as its inverse, that Python's collector may take of the event loop: 5 ms in 20 s."""

NUM_ARENAS = 2
"""Arenas of the process. Threads seldom wait for one: most allocate under the interpreter's lock."""


def keep_little(large_bytes: int = LARGE_BYTES) -> bool:
    """Make glibc return freed blocks of `large_bytes` or more to the system at once, and share `NUM_ARENAS` arenas
    among all threads. Return False if it is another C library, or refuses.

    Call it once for the whole process, before its threads begin.

    glibc raises its threshold for blocks that it maps one by one each time such a block is freed, up to 32 MiB. Smaller
    blocks lie in a thread's arena, which keeps them: the arena of a worker that had moved states of all sizes for half
    an hour held 67 MB, of which 37 were free. Each thread has an arena, up to eight for each core, and the others can't
    use what is free in it: nine arenas of a worker had 20 MiB free between them. A gateway that had read thirty
    messages of 8 MB kept 140 MiB; with these settings it keeps 2. Source: mallopt(3).
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    mallopt = library.mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return bool(mallopt(M_MMAP_THRESHOLD, large_bytes) and mallopt(M_ARENA_MAX, NUM_ARENAS))


def can_take(num_bytes: int) -> bool:
    """Return whether so much memory can be had now; it is given back at once, in some microseconds."""
    try:
        mmap.mmap(-1, num_bytes).close()
    except (OSError, ValueError, MemoryError):
        return False
    return True


def give_back_free() -> None:
    """Give the free memory between used blocks back to the system, in some milliseconds, without the interpreter's
    lock. Source: malloc_trim(3).
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


class HeapUpkeep:
    """Gives back the memory of many small freed blocks, such as those of hundreds of connections that closed.

    An error knows the frames that it passed, and one of these often knows the error: what such a ring holds, a prompt
    of megabytes, is only freed by Python's collector, and a quiet process calls that hardly ever.
    """

    async def run(self) -> None:
        """Give free memory back every `GIVE_BACK_EVERY_S` until cancelled."""
        collect_at = 0.0
        while True:
            await asyncio.sleep(GIVE_BACK_EVERY_S)
            began_at = time.monotonic()
            if began_at >= collect_at:
                gc.collect()
                collect_at = began_at + COLLECT_FACTOR * (time.monotonic() - began_at)
            await asyncio.to_thread(give_back_free)


def started_threads(name: str, at_once: int) -> ThreadPoolExecutor:
    """Return a pool whose threads all run already. Raises RuntimeError where one can't be started.

    An ordinary pool starts them when jobs come, and without memory for one the event loop waits in `Thread.start` for
    ever.
    """
    threads = ThreadPoolExecutor(at_once, thread_name_prefix=name)
    together = threading.Barrier(at_once)
    try:
        for job in [threads.submit(together.wait) for _ in range(at_once)]:
            job.result()
    except BaseException:
        together.abort()
        threads.shutdown(wait=False, cancel_futures=True)
        raise
    return threads
