"""Sets limits on the process that calls it: a worker, so that its crash harms no other process and reveals nothing; or
a helper (`workers.process.helper_process`), before it reads untrusted input. Also sets up the C library's malloc, so
that freed memory returns to the system, and makes thread pools whose threads run from the start.
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
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

STDERR = 2

OOM_SCORE = Path("/proc/self/oom_score_adj")
OOM_ADDED = 300
"""Minimum of a worker's `oom_score_adj` (1000 at most), so that the kernel kills the worker, which has most of the
memory, and not Redis or a gateway. A process may raise its own score. Source: proc_pid_oom_score_adj(5)."""

NO_CORE = 1
"""Maximum size of a core file in bytes. No core file is this small, so none is written. Unlike 0, it also keeps Linux
from piping the process's memory to the program that `core_pattern` names. Source: fs/coredump.c of Linux; core(5)."""


def isolate(*, core_dumps: bool) -> None:
    """Set a worker's limits, once, before the model is loaded. `core_dumps`: leave the limit on core files as it is."""
    # Prints the stack of the thread that got a SIGSEGV, SIGABRT or the like: functions and lines, no values.
    faulthandler.enable(file=STDERR, all_threads=False)
    # Without this ggml forks this process and runs a debugger on it, whose output can contain a caller's text.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    if not core_dumps:
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        wanted = NO_CORE if sys.platform == "linux" else 0
        resource.setrlimit(resource.RLIMIT_CORE, (min(wanted, hard) if hard >= 0 else wanted, hard))
    with contextlib.suppress(OSError, ValueError):  # not Linux, or a container that forbids it
        OOM_SCORE.write_text(str(max(OOM_ADDED, int(OOM_SCORE.read_text()))))


def num_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_to_cores(cores: Iterable[int]) -> frozenset[int]:
    """Keep this process to these cores, with all its threads and the processes that it starts. Return those of them
    that it may not run on; if there are any, nothing is changed. On systems other than Linux these are all."""
    if not hasattr(os, "sched_setaffinity"):
        return frozenset(cores)
    wanted = frozenset(cores)
    if missing := wanted - os.sched_getaffinity(0):
        return frozenset(missing)
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), wanted)
    return frozenset()


def bound_memory(extra_bytes: int) -> None:
    """Limit the address space to its present size plus `extra_bytes`. Does nothing on systems other than Linux."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    if pages:
        limit = pages * resource.getpagesize() + extra_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def bound_cpu(seconds: int) -> None:
    """Limit CPU time to `seconds` more, so a hanging process ends even without a parent. Replaces an older limit."""
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, resource.RLIM_INFINITY))


def bound_stack(num_bytes: int) -> None:
    """Limit the stack of this process's first thread: the kernel ends the process (SIGSEGV) once it needs more."""
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (min(num_bytes, hard) if hard >= 0 else num_bytes, hard))


def shut_off() -> None:
    """Forbid this process to open files, sockets or processes; open ones stay open. Import everything before.

    A process of the superuser could raise these limits again."""
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(kind, (0, 0))


M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
LARGE_BYTES = 4 << 20
"""Size from which a freed block of memory returns to the system at once, such as a saved state or a context's buffer.
The logits of a step are smaller, so that they need no system call."""


GIVE_BACK_EVERY_S = 20.0
"""Seconds between two calls of `give_back_free`, each of which takes its thread 2 ms at most."""

COLLECT_FACTOR = 4000
"""Interval between runs of Python's collector, as a multiple of how long a run stops the event loop: 20 s for 5 ms."""
SMALLER = 0.9
"""Python's collector runs early if the process has fewer blocks of memory than this multiple of what it had before the
last run. With thousands of calls it takes 60 ms, so that the next run is four minutes away; the cycles that they leave
would be kept so long."""

NUM_ARENAS = 2
"""Maximum number of malloc's arenas. Threads rarely wait for one: most allocate while they hold Python's lock."""


def keep_little(large_bytes: int = LARGE_BYTES) -> bool:
    """Make glibc return freed blocks of `large_bytes` or more to the system at once, and share `NUM_ARENAS` arenas
    among all threads. Return False if the C library is another one, or refuses.

    Call it once for the whole process, before its threads start.

    By default glibc maps only blocks above a threshold one by one, and raises that threshold, up to 32 MiB, each time
    such a block is freed. Smaller blocks are in a thread's arena, which keeps them when they are freed: the arena of a
    worker that had moved states of all sizes for half an hour held 67 MB, of which 37 were free. Each thread has an
    arena, up to eight per core, whose free memory other threads can't use: nine arenas of a worker had 20 MiB free
    together. A gateway that had read thirty messages of 8 MB kept 140 MiB; with these settings it keeps 2.
    Source: mallopt(3)."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    mallopt = library.mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return bool(mallopt(M_MMAP_THRESHOLD, large_bytes) and mallopt(M_ARENA_MAX, NUM_ARENAS))


def can_take(num_bytes: int) -> bool:
    """Return whether `num_bytes` of memory can be allocated now. They are freed at once; it takes some microseconds."""
    try:
        mmap.mmap(-1, num_bytes).close()
    except (OSError, ValueError, MemoryError):
        return False
    return True


def give_back_free() -> None:
    """Return free memory between used blocks to the system. It takes some milliseconds, without the interpreter's lock.
    Source: malloc_trim(3)."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


class HeapUpkeep:
    """Returns the memory of many small freed blocks to the system, such as that of hundreds of closed connections.

    Also runs Python's collector, which a quiet process hardly ever does by itself. An exception references the frames
    that it passed through, and one of them often references the exception: only the collector frees such a cycle, which
    can hold a prompt of megabytes."""

    async def run(self) -> None:
        """Return free memory to the system every `GIVE_BACK_EVERY_S` until cancelled. Run the collector when due, and
        when the process has become much smaller: it takes little time then."""
        collect_at, num_blocks = 0.0, 0
        while True:
            await asyncio.sleep(GIVE_BACK_EVERY_S)
            began_at = time.monotonic()
            if began_at >= collect_at or sys.getallocatedblocks() < SMALLER * num_blocks:
                num_blocks = sys.getallocatedblocks()
                gc.collect()
                collect_at = began_at + COLLECT_FACTOR * (time.monotonic() - began_at)
            await asyncio.to_thread(give_back_free)


def started_threads(name: str, at_once: int, *, stack_bytes: int = 0) -> ThreadPoolExecutor:
    """Return a pool of `at_once` threads that all run already. Raises RuntimeError if one can't be started.

    `stack_bytes`: size of each thread's stack, of which only what is used takes memory; 0: the system's default.

    An ordinary pool starts its threads as jobs come. If there is no memory for a thread then, the event loop waits in
    `Thread.start` for ever."""
    threads = ThreadPoolExecutor(at_once, thread_name_prefix=name)
    together = threading.Barrier(at_once)
    default_bytes = threading.stack_size(stack_bytes)
    try:
        for job in [threads.submit(together.wait) for _ in range(at_once)]:
            job.result()
    except BaseException:
        together.abort()
        threads.shutdown(wait=False, cancel_futures=True)
        raise
    finally:
        threading.stack_size(default_bytes)
    return threads
