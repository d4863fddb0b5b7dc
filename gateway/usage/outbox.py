"""The batches of one journal on their way to the ledger: a few at a time, each kept until it is committed."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

import msgspec

from accounts.protocol.usage import EncodedBatch, batch_name, encode_batch
from gateway.store.usage import BatchOffer, BatchState
from gateway.usage.journal import Journal

log = logging.getLogger(__name__)

WINDOW = 16
"""Maximum number of batches that are sent and not committed: the rest waits on disk, not in Redis."""
BATCH_RECORDS = 100
BATCH_BYTES = 32 << 10
"""Limits of one batch."""


@dataclass(slots=True)
class Batch:
    """One batch on its way."""

    name: str
    last: int
    encoded: bytes
    wants_content: bool = True
    """Whether Redis does not have it, as far as is known, so that its content is to be sent."""
    is_committed: bool = False


class Outbox:
    """The batches of one journal that are on their way."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._window: deque[Batch] = deque()
        self._taken = journal.committed
        """Number of the last record in the window."""

    @property
    def is_empty(self) -> bool:
        """Whether the ledger has everything."""
        return self.journal.num_uncommitted == 0

    @property
    def has_more(self) -> bool:
        """Whether something could be sent now that was not sent yet."""
        return any(batch.wants_content for batch in self._window) or (
            self._taken < self.journal.last and len(self._window) < WINDOW
        )

    def offers(self, max_bytes: int) -> list[tuple[Batch, BatchOffer]]:
        """Return what to send and to ask about, with about `max_bytes` of content at most. Raises OSError."""
        self._fill()
        chosen: list[tuple[Batch, BatchOffer]] = []
        for batch in self._window:
            if batch.is_committed:
                continue
            sends = batch.wants_content and max_bytes > 0
            if sends:
                max_bytes -= len(batch.encoded)
            if sends or not batch.wants_content:
                chosen.append((batch, BatchOffer(batch.name, batch.encoded if sends else b"")))
        return chosen

    def note(self, batch: Batch, state: BatchState) -> None:
        """Note what Redis said of a batch."""
        batch.wants_content = state in (BatchState.ABSENT, BatchState.FULL)
        batch.is_committed = state is BatchState.COMMITTED
        while self._window and self._window[0].is_committed:
            self.journal.commit(self._window.popleft().last)

    def _fill(self) -> None:
        while self._taken < self.journal.last and len(self._window) < WINDOW:
            records = self.journal.read(self._taken, BATCH_RECORDS, BATCH_BYTES)
            if not records:
                self._skip()
                continue
            first, self._taken = self._taken + 1, self._taken + len(records)
            process = self.journal.process
            batch = EncodedBatch(process=process, records=tuple(map(msgspec.Raw, records)))
            self._window.append(Batch(batch_name(process, first, self._taken), self._taken, encode_batch(batch)))

    def _skip(self) -> None:
        """Leave out records that can't be read, because somebody changed or deleted their file."""
        last = self.journal.gap_after(self._taken)
        log.error("usage of %d calls can't be read from disk and is lost", last - self._taken)
        self._taken = last
        self._window.append(Batch("", last, b"", is_committed=True))
