"""The journal of one gateway process: its usage records that the ledger does not have yet, and its running calls.

It lies in the folder `usage` of the state folder. Where the disk fails, records are held in memory, and calls go on.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gateway.usage.running_calls import SUFFIX, RunningCalls, create_table
from gateway.usage.segments import NEARLY_FULL, JournalFull, Segments

log = logging.getLogger(__name__)

FOLDER_MODE = 0o700
MAX_HELD = 10_000
"""Maximum number of records held in memory while the disk takes none; further ones are dropped."""
RETRY_S = 1.0
"""Seconds between two attempts to write to a disk that failed."""


class Journal:
    """The records of one process in the order of their numbers, on disk and, behind them, in memory."""

    def __init__(self, process: str, segments: Segments, last: int, committed: int) -> None:
        """`last`: number of the last record on disk; `committed`: the ledger has it and all before."""
        self.process = process
        self.last = last
        self.committed = committed
        self._segments = segments
        self._held: deque[bytes] = deque()
        """Records that the disk did not take, the last of which has the number `last`."""

    @property
    def num_uncommitted(self) -> int:
        return self.last - self.committed

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return self._segments.num_bytes

    def read(self, after: int, max_records: int, max_bytes: int) -> list[bytes]:
        """Return records that follow number `after`, with numbers in a row. Raises OSError."""
        num_on_disk = self.last - len(self._held)
        if after < num_on_disk:
            return self._segments.read(after, max_records, max_bytes)
        records: list[bytes] = []
        num_bytes = 0
        for place in range(after - num_on_disk, min(len(self._held), after - num_on_disk + max_records)):
            num_bytes += len(self._held[place])
            if records and num_bytes > max_bytes:
                break
            records.append(self._held[place])
        return records

    def gap_after(self, number: int) -> int:
        """Return the number before the next record that may be readable, where the one after `number` is not."""
        first = self._segments.begins_after(number)
        return self.last - len(self._held) if first is None else first - 1

    def commit(self, number: int) -> None:
        """Note that the ledger has all records up to this number, and delete what is not needed any more."""
        num_on_disk = self.last - len(self._held)
        self.committed = max(self.committed, number)
        self._segments.forget(self.committed)
        for _ in range(self.committed - num_on_disk):
            self._held.popleft()

    def close(self) -> None:
        self._segments.close()


class OwnJournal(Journal):
    """The journal of this process. Used by the thread of the event loop only."""

    def __init__(self, folder: Path, process: str, max_bytes: int, count: Callable[[str], None]) -> None:
        """`count` is called for each record with what became of it: `kept`, `held` (in memory) or `dropped`."""
        super().__init__(process, Segments(folder, process, max_bytes), 0, 0)
        self._folder = folder
        self._count = count
        self._table: int | None = None
        self._lost_tables: list[int] = []
        """Descriptors of tables that the disk does not take any more. Their locks keep others from taking this process
        for dead, until a new table has their name."""
        self._retry_at = 0.0
        self._failure = ""
        self._is_nearly_full = self._is_full = False
        self.calls = self._open_table(0)

    def commit(self, number: int) -> None:
        self.calls.set_committed(max(self.committed, number))  # before its files go, which tell the last number
        super().commit(number)

    def add(self, record: bytes, serial: int) -> None:
        """Add the record that has the number `last + 1`; `serial`: its call's. Never raises."""
        self._add(record, serial)
        self.calls.set_last(self.last)

    def _add(self, record: bytes, serial: int) -> None:
        if self._held or self._table is None:
            self._retry()
        if not self._held and self._table is not None and self._write(record, serial):
            return
        if self._is_full or len(self._held) >= MAX_HELD:
            self._count("dropped")
            return
        self._held.append(record)
        self.last += 1
        self._count("held")

    def beat(self) -> None:
        """Note in the table that the process is alive. Called a few times a second."""
        if self._table is not None and self.calls.failure is not None:
            self._lost_tables.append(self._table)
            self._table = None
            self._note_failure(self.calls.failure)
        if self._table is None or self._held:
            self._retry()
        self.calls.beat()
        if self._is_nearly_full and not self._segments.is_nearly_full:
            log.info("there is room for usage on disk again")
            self._is_nearly_full = False

    def set_beside(self, num_bytes: int) -> None:
        """Set how many bytes the journals of dead processes take, which count with this one's."""
        self._segments.num_bytes_beside = num_bytes

    def remove(self) -> None:
        """Delete the journal, which has nothing that the ledger lacks. Without this the next process takes it over."""
        self.close()
        with suppress(OSError):
            (self._folder / f"{self.process}{SUFFIX}").unlink()

    def _write(self, record: bytes, serial: int) -> bool:
        """Write a record to disk. Return whether it is there, or may not be."""
        try:
            self._segments.append(self.last + 1, serial, record)
        except JournalFull:
            self._note_full()
            return False
        except OSError as error:
            self._note_failure(error)
            return False
        self.last += 1
        self._count("kept")
        self._is_full = False
        if not self._is_nearly_full and self._segments.is_nearly_full:
            self._is_nearly_full = True
            share = f"{NEARLY_FULL:.0%} of usage_journal_mib"
            log.warning("usage on disk has reached %s: the ledger takes none; see that paddock accounts runs", share)
        return True

    def _retry(self) -> None:
        """Try again to use the disk, now and then: write there what is held in memory."""
        now = time.monotonic()
        if now < self._retry_at:
            return
        self._retry_at = now + RETRY_S
        if self._table is None:
            self.calls = self._open_table(self.calls.serial)
        number = self.last - len(self._held)
        while self._held and self._table is not None:
            try:
                # Their calls have ended, so that no serial number of a running one can be theirs.
                self._segments.append(number + 1, 0, self._held[0])
            except (JournalFull, OSError):
                return
            number += 1
            self._held.popleft()
        if self._failure and self._table is not None:
            log.info("usage is written to disk again")
            self._failure = ""

    def _open_table(self, serial: int) -> RunningCalls:
        try:
            self._folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            self._table = create_table(self._folder, self.process)
        except OSError as error:
            self._note_failure(error)
        else:
            while self._lost_tables:
                os.close(self._lost_tables.pop())
        calls = RunningCalls(self._table, serial)
        calls.set_last(self.last)
        calls.set_committed(self.committed)
        return calls

    def _note_failure(self, error: OSError) -> None:
        self._retry_at = time.monotonic() + RETRY_S
        why = error.strerror or str(error)
        if why != self._failure:
            self._failure = why
            where = os.fspath(self._folder)
            log.error("usage can't be written to %s (%s); it is held in memory, up to %d records", where, why, MAX_HELD)

    def _note_full(self) -> None:
        if not self._is_full:
            self._is_full = True
            log.error("usage on disk has reached usage_journal_mib: records are dropped until the ledger takes some")
