"""Notes until when calls were deleted from the database, so that none of them is written, and counted, once more.

A record is known by its row. Once the row is deleted, as it is older than is kept, nothing tells a record that is sent
again from a new one: all records of that time are refused then.
"""

from __future__ import annotations

from sqlalchemy import Connection, select, update
from sqlalchemy.dialects import postgresql, sqlite

from accounts.database.schema import facts

DELETED_UNTIL = "usage_deleted_until"
"""Name of the fact: unix time."""


def hold_deleted_until(connection: Connection) -> float:
    """Return the time before which calls may have been deleted; none are until the transaction has ended, which is one
    that writes."""
    wanted = select(facts.c.value).where(facts.c.name == DELETED_UNTIL)
    # On SQLite the transaction has the lock on all writing anyway.
    found = connection.execute(wanted.with_for_update(read=True)).scalar()
    if found is not None:
        return float(found)
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    connection.execute(insert(facts).values(name=DELETED_UNTIL, value="0.0").on_conflict_do_nothing())
    return float(connection.execute(wanted.with_for_update(read=True)).scalar_one())


def note_deletion(connection: Connection, until: float) -> None:
    """Note that calls before this time are deleted. Call it first in the transaction that deletes them."""
    if hold_deleted_until(connection) < until:
        connection.execute(update(facts).where(facts.c.name == DELETED_UNTIL).values(value=repr(until)))
