"""A process's index of the disk tier's folder: names, sizes and last uses, from scans now and then and its own work.

Other processes write and remove too, so the index tells what was true lately. Opening a file decides whether it is
there; the sums decide when to scan again. One thread changes the index; any thread may call `knows`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from workers.engine.disk.folder import CacheFolder, Entry, Place
from workers.engine.disk.keys import NAME_HEX

LOW_WATER = 0.9
"""Share of its cap to which a store that is over it shrinks, so that it rarely has to look for the oldest files."""

REFRESH_S = 60.0
REFRESH_SHARE = 0.01
"""Most of the thread's time that all scans together may take, a share."""

HURRIED_S = 0.5
HURRIED_SHARE = 0.1
"""`REFRESH_SHARE` for a scan after a worker has left: the files that it wrote may be wanted at once."""


class DiskIndex:
    def __init__(self, folder: CacheFolder, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.next_scan_at = 0.0
        """When the next scan is due, `time.monotonic` seconds."""
        self.next_hurried_at = 0.0
        """When a scan may come at the earliest after a worker has left, `time.monotonic` seconds."""
        self._folder = folder
        self._entries: dict[Place, Entry] = {}
        self._written_since: dict[Place, Entry] | None = None
        """Files that this process has written since the running scan began; None: no scan runs."""

    @property
    def num_files(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        return self.num_bytes > self.max_bytes

    def knows(self, place: Place) -> bool:
        return place in self._entries

    def size(self, place: Place) -> int:
        """Return the bytes of the file; 0 if it is not known."""
        entry = self._entries.get(place)
        return 0 if entry is None else entry.size

    def states(self, version: str) -> list[Place]:
        """Return the places of all whole states of a version."""
        return [place for place in self._entries if len(place.name) > NAME_HEX and place.version == version]

    def add(self, place: Place, size: int) -> None:
        """Add a file that this process has written."""
        entry = Entry(place, size, time.time())
        self.forget(place)
        self._entries[place] = entry
        self.num_bytes += size
        if self._written_since is not None:
            self._written_since[place] = entry

    def forget(self, place: Place) -> None:
        """Remove a file that is gone."""
        entry = self._entries.pop(place, None)
        if entry is not None:
            self.num_bytes -= entry.size
        if self._written_since is not None:
            self._written_since.pop(place, None)

    def scan(self) -> Iterator[None]:
        """Scan the folder anew; yields after each leaf, so that other work can come between. May raise OSError."""
        started = time.monotonic()
        self._written_since = {}
        try:
            entries: dict[Place, Entry] = {}
            for leaf in self._folder.leaves():
                entries.update((entry.place, entry) for entry in self._folder.entries(leaf))
                yield
            entries |= self._written_since
            self._entries = entries
            self.num_bytes = sum(entry.size for entry in entries.values())
        finally:
            self._written_since = None
            now = time.monotonic()
            self.next_scan_at = now + max(REFRESH_S, (now - started) / REFRESH_SHARE)
            self.next_hurried_at = now + max(HURRIED_S, (now - started) / HURRIED_SHARE)

    def shrink(self) -> int:
        """Remove the least recently used files down to `LOW_WATER`; return how many. Call it right after a scan."""
        entries = list(self._entries.values())
        # numpy's sort releases the interpreter lock, list.sort does not.
        order = np.argsort(np.fromiter((entry.used_at for entry in entries), np.float64, len(entries)), kind="stable")
        removed = 0
        for at in order:
            if self.num_bytes <= self.max_bytes * LOW_WATER:
                break
            entry = entries[int(at)]
            self._folder.remove(entry.place)  # where another process was quicker, it is gone all the same
            self.forget(entry.place)
            removed += 1
        return removed
