"""Reads what running processes take of main memory: of a worker and its helper processes, or of this process.

Anonymous memory counts, and the pages of model files that are mapped: without them in memory nothing is computed in
time. Pages of programs and libraries don't: they are there once for all processes, and the kernel drops them first.
Source: `/proc/PID/smaps` and `/proc/PID/smaps_rollup` in the Linux kernel's documentation of proc.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

PROC = Path("/proc")


def anonymous_bytes(pid: int | None = None) -> int:
    """Return the anonymous bytes of a process (None: this one), those in swap included; 0 where they are not told."""
    return _sums(pid, ("Anonymous", "Swap"))


def taken_bytes(pid: int, files: Collection[Path] = ()) -> int | None:
    """Return the bytes that a process and its children take; None where the system does not tell. Pages that several of
    them share count once, also those of the mapped `files`. It takes some milliseconds."""
    try:
        found = [*_with_children(pid)]
        mapped = sum(_mapped(pid, files)) if files else 0
    except OSError:
        return None
    return mapped + sum(_sums(one, ("Pss_Anon", "Pss_Shmem", "SwapPss")) for one in found)


def swapped_bytes(pid: int) -> int:
    """Return the bytes of a process and its children that are in swap; 0 where that is not told."""
    return sum(_sums(one, ("SwapPss",)) for one in process_ids(pid))


def process_ids(pid: int) -> list[int]:
    """Return the ids of a process and its children; none where that is not told."""
    try:
        return [*_with_children(pid)]
    except OSError:
        return []


def num_processes(pid: int) -> int:
    """Return how many processes a process and its children are; 0 where that is not told."""
    return len(process_ids(pid))


def _with_children(pid: int) -> Iterator[int]:
    yield pid
    for task in (PROC / str(pid) / "task").iterdir():
        for child in (task / "children").read_text("ascii").split():
            yield from _with_children(int(child))


def _sums(pid: int | None, names: Collection[str]) -> int:
    try:
        text = (PROC / ("self" if pid is None else str(pid)) / "smaps_rollup").read_text("ascii")
    except OSError:  # it has ended, or the system has no such file
        return 0
    lines = (line.split() for line in text.splitlines()[1:])
    return sum(int(line[1]) << 10 for line in lines if line[0].rstrip(":") in names)


def _mapped(pid: int, files: Collection[Path]) -> Iterator[int]:
    """Yield the bytes in memory of each mapping of one of the files."""
    wanted, is_wanted = {str(file.resolve()) for file in files}, False
    for line in (PROC / str(pid) / "smaps").read_text("utf-8", "replace").splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            is_wanted = line.split(maxsplit=5)[5:] != [] and line.split(maxsplit=5)[5] in wanted
        elif is_wanted and first == "Rss:":
            yield int(rest.split()[0]) << 10
