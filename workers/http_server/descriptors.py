"""Raises the limit of file descriptors as far as the system allows, and keeps a few in reserve."""

from __future__ import annotations

import contextlib
import os
import resource

MOST = 1 << 20
"""Descriptors that are enough for anybody; some systems say that there is no limit."""
NUM_SPARE = 16


def raise_limit() -> int:
    """Let this process open as many files as it may; return their number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    with contextlib.suppress(OSError, ValueError):  # macOS has a bound of its own below what it tells
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class SpareDescriptors:
    """Descriptors that are held open, so that one can be given up when there are no others."""

    def __init__(self, count: int = NUM_SPARE) -> None:
        self._count = count
        self._open: list[int] = []
        self.refill()

    def give_up(self) -> bool:
        """Close one; return False where none is left."""
        if not self._open:
            return False
        os.close(self._open.pop())
        return True

    def refill(self) -> bool:
        """Open as many of the missing ones as can be had; return whether none is missing now."""
        with contextlib.suppress(OSError):
            while len(self._open) < self._count:
                self._open.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        return len(self._open) == self._count

    def close(self) -> None:
        while self.give_up():
            pass
