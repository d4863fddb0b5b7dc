"""What the ledger of a test's accounts service says, read straight from its database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from sqlalchemy import Row, select
from sqlalchemy.exc import OperationalError

from accounts.database.database import Database
from accounts.database.schema import usage

Rows = Sequence[Row[tuple[object, ...]]]


def rows_of(database: Database, prefix: str = "") -> Rows:
    """The rows of calls whose request id begins so, in the order in which they were written."""
    with database.reading() as connection:
        found = connection.execute(
            select(usage).where(usage.c.request_id.startswith(prefix, autoescape=True)).order_by(usage.c.id)
        )
        return list(found.all())


async def rows_when(database: Database, is_complete: Callable[[Rows], bool], prefix: str = "") -> Rows:
    """The rows, as soon as they are complete."""
    deadline = time.monotonic() + 30
    rows: Rows = []
    while True:
        with suppress(OperationalError):  # the service may not have made the tables yet
            rows = await asyncio.to_thread(rows_of, database, prefix)
        if is_complete(rows):
            return rows
        assert time.monotonic() < deadline, f"the ledger has {len(rows)} rows: {rows}"
        await asyncio.sleep(0.05)
