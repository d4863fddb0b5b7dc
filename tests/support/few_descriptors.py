"""A process that can open nothing more: the limit of its file descriptors, which any process may set for itself."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def few_descriptors(most: int = 3, pid: int = 0) -> Iterator[None]:
    """Let a process (0: this one) and those that it starts open no descriptor from `most` on, meanwhile. Those that are
    open stay open."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
