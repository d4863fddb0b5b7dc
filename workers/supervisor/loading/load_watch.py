"""Watches a worker's process while it loads its model: how much is done, and whether it goes on at all.

The worker tells the share of its weights that llama.cpp has loaded in its record (`workers.process.black_box`). A file
that is mapped is read before llama.cpp counts anything, so the pages that the process has of files count as well.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from workers.process.black_box import progress_of

LOOK_EVERY_S = 0.2
LOAD_TIMEOUT_S = 1800.0
"""Seconds without progress after which a worker that does not register counts as hung though it computes or reads."""
GAP_S = 5.0
"""Seconds between two looks after which the time between them does not count: nobody has watched."""
LIBRARIES_BYTES = 256 << 20
"""Pages of programs and libraries that a process may have beside those of its model; a smaller file tells nothing."""
PROC = Path("/proc")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Signs:
    """The signs of life of a process."""

    cpu_ticks: int
    file_bytes: int
    """Pages of files in its memory."""
    read_bytes: int
    """Bytes that it had the disk read."""

    @classmethod
    def of(cls, pid: int) -> Signs | None:
        """Return a process's signs of life; None where the system does not tell them."""
        try:
            # The name of the program, in brackets, may hold spaces.
            stat = (PROC / str(pid) / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
            shared = int((PROC / str(pid) / "statm").read_text("ascii").split()[2])
            told = (PROC / str(pid) / "io").read_text("ascii").splitlines()
            read = next(int(line.split()[1]) for line in told if line.startswith("read_bytes:"))
        except (OSError, ValueError, IndexError, StopIteration):
            return None
        return cls(int(stat[11]) + int(stat[12]), shared * PAGE_BYTES, read)


@dataclass(slots=True)
class LoadWatch:
    """The watch of one load. Call `look` again and again while it lasts."""

    record: Path
    """The worker's record, in which it tells its progress."""
    size: int
    """Bytes of the model's files that are mapped; 0: none are."""
    begun_at: float
    progress: float | None = None
    """Share of the weights that is loaded; None: not known yet."""
    _moved_at: float = field(init=False)
    _alive_at: float = field(init=False)
    _looked_at: float = field(init=False)
    _signs: Signs | None = None

    def __post_init__(self) -> None:
        self._moved_at = self._alive_at = self._looked_at = self.begun_at

    def again(self, now: float) -> LoadWatch:
        """Return a watch of the process that is started in place of this one."""
        return LoadWatch(self.record, self.size, now)

    def look(self, pid: int | None, now: float) -> None:
        """Take in how far the process is. `pid` None: it is being started."""
        gap_s = now - self._looked_at
        if 0 <= gap_s < LOOK_EVERY_S:
            return
        self._looked_at = now
        signs = Signs.of(pid) if pid is not None else None
        told = self._told(signs)
        if told is not None and (self.progress is None or told > self.progress):  # pages of a file may leave again
            self.progress, self._moved_at = told, now
        if not 0 <= gap_s < GAP_S:
            self._moved_at = now
        if signs is None or signs != self._signs or self._moved_at == now:
            self._alive_at = now
        self._signs = signs

    def hung(self, stall_s: float, now: float) -> str:
        """Return why the load counts as hung, in words; empty: it does not. `stall_s`: seconds that it may do nothing
        at all; 0: any time."""
        done = "" if self.progress is None else f", with {100 * self.progress:.0f} % loaded"
        if stall_s and now - self._alive_at > stall_s:
            return f"it did nothing for {stall_s:g} s while it loaded{done}"
        if now - self._moved_at > LOAD_TIMEOUT_S:
            return f"it made no progress for {LOAD_TIMEOUT_S:g} s{done}, and did not register"
        return ""

    def _told(self, signs: Signs | None) -> float | None:
        """Return the share that is loaded by llama.cpp's count, or by the pages of the mapped file if that is more."""
        counted = progress_of(self.record)
        if counted is None or signs is None or self.size < 2 * LIBRARIES_BYTES:
            return counted
        mapped = max(0, signs.file_bytes - LIBRARIES_BYTES) / self.size
        return max(counted, min(0.99, round(mapped, 2)))


def mapped_size(files: Sequence[Path]) -> int:
    """Return the bytes of these files; 0 if one can't be looked at."""
    try:
        return sum(file.stat().st_size for file in files)
    except OSError:
        return 0
