"""What a process that works on what nobody vouches for does to itself first (`workers.stoppable` is its other end)."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path


def bound_memory(extra_bytes: int) -> None:
    """So much beyond what the process takes now; on Linux."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    if pages:
        limit = pages * resource.getpagesize() + extra_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def bound_cpu(seconds: int) -> None:
    """From now on, until this is called again: the end of one that hangs when nobody is left to kill it."""
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, resource.RLIM_INFINITY))


def shut_off() -> None:
    """No file, socket or process can be opened any more; what is open stays. Import everything first.

    For a process of the superuser's this is a habit, not a wall: it could take it back.
    """
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(kind, (0, 0))
