"""Reads this process's metrics from the system; none where there is no `/proc`."""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from pathlib import Path

from workers.protocol.metrics import of_process
from workers.protocol.metrics.book import Book

PROC = Path("/proc")


class Process:
    """The process's metrics, read at each scrape from two small files and a folder."""

    def __init__(self, book: Book) -> None:
        self._virtual = book.gauge(of_process.VIRTUAL_MEMORY)
        self._resident = book.gauge(of_process.RESIDENT_MEMORY)
        self._started = book.gauge(of_process.START_TIME)
        self._cpu = book.counter(of_process.CPU)
        self._open = book.gauge(of_process.OPEN_FDS)
        self._most = book.gauge(of_process.MAX_FDS)
        self._tasks = book.gauge(of_process.TASKS)
        version = sys.version_info
        book.gauge(of_process.PYTHON_INFO).set(
            1,
            platform.python_version(),
            platform.python_implementation(),
            *(str(part) for part in (version.major, version.minor, version.micro)),
        )
        book.read_first(self.read)

    def count_tasks(self) -> None:
        """Count the event loop's tasks; on the loop, as no other thread may. Some thousands take a millisecond."""
        self._tasks.set(len(asyncio.all_tasks()))

    def read(self) -> None:
        """Read the metrics. For any thread."""
        try:
            self._read_stat()
            self._open.set(len(os.listdir(PROC / "self" / "fd")))
            self._most.set(_max_fds())
        except OSError:
            return

    def _read_stat(self) -> None:
        """Read the fields of proc(5) from the third on: the second may hold spaces."""
        fields = (PROC / "self" / "stat").read_text().rpartition(") ")[2].split()
        ticks = os.sysconf("SC_CLK_TCK")
        self._cpu.become((int(fields[11]) + int(fields[12])) / ticks)
        self._started.set(_booted_at() + int(fields[19]) / ticks)
        self._virtual.set(int(fields[20]))
        self._resident.set(int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))


def _booted_at() -> int:
    """Return the Unix time at which the machine booted."""
    for line in (PROC / "stat").read_text().splitlines():
        if line.startswith("btime "):
            return int(line.split()[1])
    return 0


def _max_fds() -> float:
    for line in (PROC / "self" / "limits").read_text().splitlines():
        if line.startswith("Max open files"):
            soft = line.split()[3]
            return float("inf") if soft == "unlimited" else float(soft)
    return 0.0
