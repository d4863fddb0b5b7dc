"""Writes usage from the stream into the database, in one transaction per reading, and tells gateways what is committed.

A database that is away delays records: they wait in the stream, and behind it on the gateways' disks. What can't be
written, whatever the database's state, is set aside, so that it holds nothing up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import redis.asyncio
from redis.exceptions import RedisError
from sqlalchemy import Connection
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError, StatementError

from accounts.database.database import Database
from accounts.errors import DatabaseAway
from accounts.ledger.rows import hold_deleted_until, write_batch, write_sums
from accounts.ledger.stream import Entry, LedgerStream
from accounts.protocol.usage import UsageBatch, UsageRecord, decode_batch, encode_batch
from workers.redis.trouble import raise_if_cancelled

log = logging.getLogger(__name__)

MAX_ENTRIES = 20
"""Maximum entries of one transaction, each of about a hundred records: some tens of milliseconds on a slow disk."""
WAIT_S = 1.0
"""Seconds that one reading waits for entries; less than the client's patience for one answer."""
RETRY_S = 1.0
"""Seconds between two attempts while Redis is away; while the database is, at first, and MOST_RETRY_S at last."""
MOST_RETRY_S = 5.0

Unwritable = (DataError, IntegrityError, ValueError, OverflowError, TypeError, msgspec.MsgspecError)
"""Errors for which the records are to blame. Those of msgspec are ValueErrors, but for some versions."""


class Follower(Protocol):
    """A part that keeps something in step with the ledger, such as what budgets have spent."""

    def on_written(self, connection: Connection, records: Sequence[UsageRecord]) -> None:
        """Take note of records that are new in the database, in the transaction that writes them: both or neither are
        committed. Runs on a thread. An error that is no SQLAlchemyError of the connection sets the records aside."""
        ...


@dataclass(slots=True)
class LedgerCounts:
    """Counts of the writer's work since its start."""

    num_written: int = 0
    num_repeated: int = 0
    """Records that were in the database already."""
    num_set_aside: int = 0
    """Entries, or single records of one."""
    num_too_old: int = 0
    """Records of a time whose calls are deleted already."""


@dataclass(slots=True)
class _Outcome:
    """The outcome of one reading."""

    num_written: int = 0
    num_repeated: int = 0
    num_too_old: int = 0
    set_aside: list[tuple[Entry, str]] = field(default_factory=list)


class LedgerWriter:
    """Writes usage. Several services may run one each, on the same database."""

    def __init__(self, redis: redis.asyncio.Redis, database: Database, followers: Sequence[Follower] = ()) -> None:
        self.counts = LedgerCounts()
        self._stream = LedgerStream(redis)
        self._database = database
        self._followers = followers
        self._is_redis_away = self._is_database_away = False

    async def run(self) -> None:
        """Write usage until cancelled. The database must have its tables."""
        while True:
            raise_if_cancelled()
            try:
                entries = await self._stream.take(MAX_ENTRIES, WAIT_S)
                if entries:
                    await self._tell(entries, await self._write(entries))
                await self._stream.tidy()
            except (RedisError, OSError) as error:
                # Entries that were written, and not told of, are read again: their records count once.
                self._note_redis(error)
                await asyncio.sleep(RETRY_S)
            else:
                self._note_redis(None)

    async def _write(self, entries: Sequence[Entry]) -> _Outcome:
        """Write entries, as soon as the database takes them."""
        wait_s = RETRY_S
        while True:
            try:
                outcome = await asyncio.to_thread(self._write_entries, entries)
            except (SQLAlchemyError, DatabaseAway) as error:
                self._note_database(error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, MOST_RETRY_S)
            else:
                self._note_database(None)
                return outcome

    async def _tell(self, entries: Sequence[Entry], outcome: _Outcome) -> None:
        """Tell gateways that the entries are done with."""
        for entry, why in outcome.set_aside:
            log.error("usage that can't be written was set aside in Redis: %s", why)
            await self._stream.set_aside(entry, why)
        await self._stream.commit(entries)
        self.counts.num_written += outcome.num_written
        self.counts.num_repeated += outcome.num_repeated
        self.counts.num_set_aside += len(outcome.set_aside)
        self.counts.num_too_old += outcome.num_too_old
        if outcome.num_too_old:
            log.warning(
                "%s usage records were not written: calls of their time are deleted already, and may have been these",
                outcome.num_too_old,
            )

    def _write_entries(self, entries: Sequence[Entry]) -> _Outcome:
        """Write entries in one transaction; if some can't be written, each in one of its own. Raises SQLAlchemyError
        where the database is to blame."""
        outcome = _Outcome()
        batches: list[tuple[Entry, UsageBatch]] = []
        for entry in entries:
            try:
                batches.append((entry, decode_batch(entry.batch)))
            except (msgspec.MsgspecError, ValueError) as error:
                outcome.set_aside.append((entry, str(error)))
        if self._try([batch for _, batch in batches], outcome) is None:
            return outcome
        for entry, batch in batches:
            if self._try([batch], outcome) is not None:
                self._write_singly(entry, batch, outcome)
        return outcome

    def _write_singly(self, entry: Entry, batch: UsageBatch, outcome: _Outcome) -> None:
        """Write each record in a transaction of its own, and set those aside that can't be written."""
        for record in batch.records:
            alone = UsageBatch(process=batch.process, records=(record,))
            if (error := self._try([alone], outcome)) is not None:
                outcome.set_aside.append((Entry(entry.id, entry.name, encode_batch(alone)), str(error)))

    def _try(self, batches: Sequence[UsageBatch], outcome: _Outcome) -> Exception | None:
        """Write batches in one transaction. Return the error for which their records are to blame; None: there is none.

        Raises SQLAlchemyError."""
        try:
            num_new, num_too_old = self._transact(batches)
        except Unwritable as error:
            return error
        except StatementError as error:
            if isinstance(error, DBAPIError):
                raise
            return error
        outcome.num_written += num_new
        outcome.num_too_old += num_too_old
        outcome.num_repeated += sum([len(batch.records) for batch in batches]) - num_new - num_too_old
        return None

    def _transact(self, batches: Sequence[UsageBatch]) -> tuple[int, int]:
        """Write the records that are new, with their sums. Return their number, and that of records too old to write:
        they may be there no longer, having been counted."""
        if not batches:
            return 0, 0
        with self._database.transaction() as connection:
            young, num_too_old = _young_of(batches, hold_deleted_until(connection))
            new = [record for batch in young for record in write_batch(connection, batch)]
            if new:
                write_sums(connection, new)
                for follower in self._followers:
                    follower.on_written(connection, new)
        return len(new), num_too_old

    def _note_redis(self, error: Exception | None) -> None:
        if error is not None and not self._is_redis_away:
            log.warning("usage can't be read from Redis (%s: %s); trying again", type(error).__name__, error)
        elif error is None and self._is_redis_away:
            log.info("usage is read from Redis again")
        self._is_redis_away = error is not None

    def _note_database(self, error: Exception | None) -> None:
        if error is not None and not self._is_database_away:
            cause = error.orig if isinstance(error, DBAPIError) else error
            log.warning("usage can't be written to the database (%s); it waits in Redis", cause)
        elif error is None and self._is_database_away:
            log.info("usage is written to the database again")
        self._is_database_away = error is not None


def _young_of(batches: Sequence[UsageBatch], deleted_until: float) -> tuple[list[UsageBatch], int]:
    """Return the batches without the records of calls that ended before a time, and the number of these."""
    young = [
        msgspec.structs.replace(batch, records=tuple(one for one in batch.records if one.ended_at >= deleted_until))
        for batch in batches
    ]
    num_young = sum([len(batch.records) for batch in young])
    return [batch for batch in young if batch.records], sum([len(batch.records) for batch in batches]) - num_young
