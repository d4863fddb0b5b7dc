"""Writes usage records and their sums into the database. A record that is there already changes nothing.

Rows of sums are written in the order of their keys, so that two services that write at the same time wait for one
another instead of locking one another out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Column, Connection, String, Table, select, update
from sqlalchemy.dialects import postgresql, sqlite

from accounts.database.schema import facts, usage, usage_days, usage_end_users, usage_hours, usage_months
from accounts.protocol.periods import UTC, span_at
from accounts.protocol.usage import UsageBatch, UsageRecord, is_failed

HOUR_S, DAY_S = 3600, 86_400
MAX_INTEGER, MAX_BIG_INTEGER = (1 << 31) - 1, (1 << 63) - 1
COUNTED = (
    *("prompt_tokens", "cached_tokens", "completion_tokens", "media_tokens", "queue_ms", "compute_ms", "cost_nano"),
)
"""Fields of a record that sums add up."""

DELETED_UNTIL = "usage_deleted_until"
"""Name of the fact: unix time."""

Row = dict[str, Any]
Key = tuple[int | str, ...]


def write_batch(connection: Connection, batch: UsageBatch) -> tuple[UsageRecord, ...]:
    """Write the records of a batch that are not there yet, and return them, as far as they fit into their columns."""
    rows = {record.number: _row(batch.process, record) for record in batch.records}
    new = _insert_new(connection, batch.process, rows)
    return tuple(fitted(record) for record in batch.records if record.number in new)


def write_sums(connection: Connection, records: Sequence[UsageRecord]) -> None:
    """Add records to the sums per hour, day, month and end user."""
    _add(connection, usage_hours, _summed(records, _hour_key))
    _add(connection, usage_days, _summed(records, _day_key))
    _add(connection, usage_months, _summed(records, _month_key))
    _add(connection, usage_end_users, _summed([one for one in records if one.end_user], _end_user_key))


def fitted(record: UsageRecord) -> UsageRecord:
    """Return the record as its columns can hold it: whoever can write to Redis could write more."""
    changes = {
        name: fit(getattr(record, name))
        for name, fit in _FITTING.items()
        if fit(getattr(record, name)) != getattr(record, name)
    }
    return msgspec.structs.replace(record, **changes) if changes else record


def _row(process: str, record: UsageRecord) -> Row:
    row: Row = {name: fit(getattr(record, name)) for name, fit in _FITTING.items()}
    row["process"] = process
    return row


def _insert_new(connection: Connection, process: str, rows: dict[int, Row]) -> set[int]:
    """Insert the rows that are not there yet; return their numbers."""
    if connection.dialect.name == "sqlite":
        # The transaction has the lock on all writing, so nobody adds any in between.
        numbers = select(usage.c.number).where(usage.c.process == process, usage.c.number.in_(rows))
        missing = rows.keys() - set(connection.scalars(numbers))
        if missing:
            connection.execute(usage.insert(), [rows[number] for number in sorted(missing)])
        return set(missing)
    insert = postgresql.insert(usage).on_conflict_do_nothing(index_elements=["process", "number"])
    found = connection.execute(insert.returning(usage.c.number), [rows[number] for number in sorted(rows)])
    return set(found.scalars())


def _add(connection: Connection, table: Table, sums: dict[Key, Row]) -> None:
    if not sums:
        return
    make = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    insert = make(table)
    added = {column.name: column + insert.excluded[column.name] for column in table.c if not column.primary_key}
    upsert = insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=added)
    connection.execute(upsert, [sums[key] for key in sorted(sums)])


def _summed(records: Iterable[UsageRecord], key_of: Callable[[UsageRecord], Row]) -> dict[Key, Row]:
    """Return one row of sums for each key."""
    sums: dict[Key, Row] = {}
    for record in records:
        key = key_of(record)
        row = sums.setdefault(
            tuple(key.values()), {**key, "num_calls": 0, "num_failed": 0, **dict.fromkeys(COUNTED, 0)}
        )
        row["num_calls"] += 1
        row["num_failed"] += is_failed(record.outcome)
        for name in COUNTED:
            row[name] += getattr(record, name)
    return sums


def _hour_key(record: UsageRecord) -> Row:
    names = ("organisation", "team", "key", "user", "alias", "model", "adapter")
    return {"hour": _begin(record.ended_at, HOUR_S), **{name: getattr(record, name) for name in names}}


def _day_key(record: UsageRecord) -> Row:
    return {"day": _begin(record.ended_at, DAY_S), **_charged(record)}


def _month_key(record: UsageRecord) -> Row:
    return {"month": span_at("month", UTC, record.ended_at).begins_at, **_charged(record)}


def _charged(record: UsageRecord) -> Row:
    return {"organisation": record.organisation, "team": record.team, "model": record.model}


def _end_user_key(record: UsageRecord) -> Row:
    return {"day": _begin(record.ended_at, DAY_S), "team": record.team, "end_user": record.end_user}


def _begin(at: float, length_s: int) -> int:
    return int(at // length_s) * length_s


def _fitting(column: Column[Any]) -> Callable[[Any], Any]:
    """Return a function that makes a value fit into the column."""
    if isinstance(column.type, String):
        length = column.type.length
        # PostgreSQL takes no NUL in a text.
        return lambda text: text.replace("\0", "")[:length]
    if column.type.python_type is int:
        most = MAX_BIG_INTEGER if column.name in ("number", "cost_nano") else MAX_INTEGER
        return lambda number: min(max(number, -most), most)
    return lambda number: number


_FITTING = {column.name: _fitting(column) for column in usage.c if column.name not in ("id", "process")}


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
