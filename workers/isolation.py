"""Settings that a worker process makes for itself first, so that a crash harms nobody else and gives nothing away."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import sys
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
    """Make the settings. Call once, before the model is loaded; `core_dumps` leaves the limit on core files alone."""
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
