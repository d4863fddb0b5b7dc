"""A disk that takes no more bytes: the limit of a file's size, which any process may set for itself."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(room: int = 0, pid: int = 0) -> Iterator[None]:
    """Let a process (0: this one) and those that it starts write no file beyond `room` bytes, meanwhile. Names can be
    made and removed."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
