"""Limits that a helper process sets on itself before it reads untrusted input (`workers.stoppable` starts it)."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path


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
