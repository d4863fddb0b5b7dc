"""Deletes usage that is older than is kept, in small batches between which others write.

Calls are kept for `usage_keep_days`; sums per hour, sums of end users, and what budgets have spent for
`usage_sums_keep_days`; sums per day and month for ever. Events for the webhook are kept for a week. A batch is as large
as the database deletes in BATCH_S, and nothing is read but the keys of what is deleted, inside the database.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, Table, delete, select, tuple_
from sqlalchemy.exc import DBAPIError

from accounts.database.database import Database
from accounts.database.schema import budget_periods, usage, usage_end_users, usage_hours, webhooks
from accounts.ledger.rows import note_deletion
from accounts.metrics import Metrics
from accounts.usage.summary import DAY_S

log = logging.getLogger(__name__)

EVERY_S = 900.0
"""Seconds between two looks for rows that are too old."""
FIRST_S = 30.0
"""Seconds after the start of the first look."""
BATCH_S = 0.03
"""Seconds for which a batch should hold the database's writer."""
KEEP_EVENTS_DAYS = 7
LEAST, MOST = 20, 5000
"""Limits of a batch, in rows."""
SHARE = 0.25
"""Share of the time that deleting takes while much is to be deleted."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One table's rows that are kept for a time."""

    table: Table
    time: str
    """Column with a row's time, unix seconds."""
    keep_days: int
    where: tuple[ColumnElement[bool], ...] = ()
    """Further conditions."""


class Retention:
    """Deletes rows that are older than is kept."""

    def __init__(self, database: Database, metrics: Metrics, keep_days: int, keep_sums_days: int) -> None:
        self._database = database
        self._metrics = metrics
        self._rules = (
            Rule(usage, "ended_at", keep_days),
            Rule(usage_hours, "hour", keep_sums_days),
            Rule(usage_end_users, "day", keep_sums_days),
            Rule(budget_periods, "ends_at", keep_sums_days),
            Rule(webhooks, "created_at", KEEP_EVENTS_DAYS, (webhooks.c.is_done.is_(True),)),
        )

    async def run(self) -> None:
        """Delete until cancelled. A database that is away is tried again."""
        await asyncio.sleep(FIRST_S)
        while True:
            try:
                await self.delete_old(time.time())
            except DBAPIError as error:
                log.warning("old usage can't be deleted, to be tried again: %s", error.orig)
            await asyncio.sleep(EVERY_S)

    async def delete_old(self, now: float) -> None:
        """Delete all that is too old at a time, in batches."""
        for rule in self._rules:
            await self._delete(rule, now - rule.keep_days * DAY_S)

    async def _delete(self, rule: Rule, cut: float) -> None:
        most, deleted = LEAST, 0
        while True:
            num, took_s = await asyncio.to_thread(self._batch, rule, cut, most)
            deleted += num
            if num < most:
                break
            # What lies in memory is deleted faster than what the disk has to be asked for.
            most = max(LEAST, min(MOST, 2 * most, round(most * BATCH_S / max(took_s, 1e-6))))
            await asyncio.sleep(took_s * (1 - SHARE) / SHARE)
        if deleted:
            self._metrics.rows_deleted.labels(rule.table.name).inc(deleted)
            log.info("old usage deleted", extra={"fields": {"table": rule.table.name, "rows": deleted}})

    def _batch(self, rule: Rule, cut: float, most: int) -> tuple[int, float]:
        """Delete a batch; return the number of rows, and the seconds for which the database's writer was held."""
        with self._database.transaction() as connection:
            began = time.monotonic()
            if rule.table is usage:
                note_deletion(connection, cut)
            num = _delete_rows(connection, rule, cut, most)
        return num, time.monotonic() - began


def _delete_rows(connection: Connection, rule: Rule, cut: float, most: int) -> int:
    keys = list(rule.table.primary_key.columns)
    old = select(*keys).where(rule.table.c[rule.time] < cut, *rule.where).order_by(rule.table.c[rule.time]).limit(most)
    is_old = keys[0].in_(old) if len(keys) == 1 else tuple_(*keys).in_(old)
    return connection.execute(delete(rule.table).where(is_old)).rowcount
