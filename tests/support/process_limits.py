"""Limits that make a process run short of disk or of file descriptors. Any process may set them for itself."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


def full_disk(room: int = 0, pid: int = 0) -> AbstractContextManager[None]:
    """Let a process (0: this one) and those that it starts write no file beyond `room` bytes, meanwhile. Names can be
    made and removed."""
    return _limited(resource.RLIMIT_FSIZE, room, pid)


def few_descriptors(most: int = 3, pid: int = 0) -> AbstractContextManager[None]:
    """Let a process (0: this one) and those that it starts open no descriptor from `most` on, meanwhile. Those that are
    open stay open."""
    return _limited(resource.RLIMIT_NOFILE, most, pid)


@contextmanager
def _limited(kind: int, most: int, pid: int) -> Iterator[None]:
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (most, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, kind, before)
