"""Takes over the journals of dead gateway processes: their records, and the calls that were cut by their death."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from accounts.protocol.usage import CUT, UsageRecord, decode_record, encode_record
from gateway.usage.journal import Journal
from gateway.usage.running_calls import NEW_SUFFIX, SUFFIX, CutCall, FoundCalls, claim_table, read_table
from gateway.usage.segments import Segments

log = logging.getLogger(__name__)

NO_LIMIT = 1 << 62
"""Bytes that the journal of a dead process may have: it gets no more than its cut calls."""
STALE_NEW_S = 60.0
"""Age of a table without its final name at which its process is taken to have died over it."""

Price = Callable[[UsageRecord], int]
"""Returns the cost of a call in billionths of the currency's unit."""


class DeadJournal(Journal):
    """The journal of a dead process, which this process has taken over. No other has it at the same time."""

    def __init__(self, path: Path, table: int, segments: Segments, last: int, committed: int) -> None:
        """`path`: the table's file; `table`: its descriptor, which holds the lock; `last` as in `Journal`."""
        super().__init__(process_of(path), segments, last, committed)
        self.num_cut = 0
        """Calls that were cut by the process's death."""
        self._path = path
        self._table = table

    def add_cut(self, record: bytes, serial: int) -> None:
        """Add the record of a cut call, which has the number `last + 1`."""
        self.num_cut += 1
        self.last += 1
        try:
            if not self._held:
                self._segments.append(self.last, serial, record)
                return
        except OSError as error:
            # Where this process is killed, too, the next one finds the same calls, and gives them the same numbers.
            log.error("a cut call's usage can't be written to disk and is held in memory: %s", error.strerror)
        self._held.append(record)

    def remove(self) -> None:
        """Delete the journal, since the ledger has all of it."""
        with suppress(OSError):
            self._path.unlink()
        self.close()

    def close(self) -> None:
        """Give the journal back to whoever looks for dead processes next."""
        super().close()
        os.close(self._table)


def adopt(folder: Path, own: str, price: Price) -> list[DeadJournal]:
    """Take over all journals in the folder whose process is dead. `own`: this process. Blocks for the disk."""
    with suppress(OSError):
        _clean(folder)
    return list(_adopted(folder, own, price))


def process_of(path: Path) -> str:
    """Return the id of the process whose table this is."""
    return path.name.removesuffix(SUFFIX)


def _adopted(folder: Path, own: str, price: Price) -> Iterator[DeadJournal]:
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        table = None if process_of(path) == own else claim_table(path)
        if table is None:
            continue
        try:
            yield _recovered(folder, path, table, price)
        except OSError as error:
            os.close(table)
            log.error("the usage of a dead gateway in %s can't be read: %s; trying again", path, error.strerror)


def _recovered(folder: Path, path: Path, table: int, price: Price) -> DeadJournal:
    found, segments = read_table(table), Segments(folder, process_of(path), NO_LIMIT)
    ended = segments.load()
    last = max(segments.last, found.last)
    journal = DeadJournal(path, table, segments, last, min(found.committed, last))
    for call in found.calls:
        record = None if call.serial in ended else _record_of(call, found, journal.last + 1, price)
        if record is not None:
            journal.add_cut(encode_record(record), call.serial)
    log.info(
        "usage of a dead gateway was found", extra={"fields": {"process": journal.process, "cut": journal.num_cut}}
    )
    return journal


def _record_of(call: CutCall, found: FoundCalls, number: int, price: Price) -> UsageRecord | None:
    """Return the record of a call that was cut; None: nobody can read whose it was."""
    try:
        began = decode_record(call.about)
    except msgspec.MsgspecError:
        log.error("a cut call is left out of usage: its slot can't be read")
        return None
    ended_at = max(began.started_at, found.alive_at)
    submitted_at = call.submitted_ms / 1000 or ended_at
    record = msgspec.structs.replace(
        began,
        number=number,
        ended_at=ended_at,
        outcome=CUT,
        prompt_tokens=call.prompt_tokens,
        cached_tokens=call.cached_tokens,
        media_tokens=call.media_tokens,
        completion_tokens=call.completion_tokens,
        queue_ms=call.queue_ms,
        compute_ms=max(0, round((ended_at - submitted_at) * 1000)),
    )
    return msgspec.structs.replace(record, cost_nano=price(record))


def _clean(folder: Path) -> None:
    """Delete tables that were begun and never finished."""
    for path in folder.glob(f"*{NEW_SUFFIX}"):
        if time.time() - path.stat().st_mtime > STALE_NEW_S:
            path.unlink(missing_ok=True)
