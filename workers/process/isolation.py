"""Limits that a process sets on itself: a worker, so that its crash harms nobody else and gives nothing away; a helper
process (`workers.process.helper_process`), before it reads untrusted input.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import sys
import time
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
