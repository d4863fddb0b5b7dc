"""The tables of the accounts database, for SQLite and PostgreSQL alike.

Access: what may be called by whom, as records (JSON, `accounts.protocol.records`) beside the columns that queries need.
Usage: one row per call, and sums per hour and day that are updated in the same transaction.
Times are unix seconds; money is in billionths of the currency's unit.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
    column,
    literal_column,
)
from sqlalchemy.sql import quoted_name

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

NAME, LONG_NAME = String(64), String(256)
SERIAL = BigInteger().with_variant(Integer, "sqlite")
"""The type of a number that the database counts up by itself."""


def _of_record() -> tuple[Column[Any], ...]:
    """Return what each table of records has. `version`: number of the record's last change in `audit`. `applied`: the
    record was declared by a file (`paddock apply`), and so may be deleted once the file lacks it."""
    return (
        Column("record", Text, nullable=False),
        Column("metadata", JSON, nullable=False, default=dict),
        Column("version", BigInteger, nullable=False),
        Column("applied", Boolean, nullable=False, default=False),
        Column("created_at", Float, nullable=False),
        Column("updated_at", Float, nullable=False),
    )


organisations = Table(
    "organisations",
    metadata,
    Column("name", NAME, primary_key=True),
    *_of_record(),
)

teams = Table(
    "teams",
    metadata,
    Column("name", NAME, primary_key=True),
    Column("organisation", NAME, ForeignKey("organisations.name"), nullable=False, index=True),
    *_of_record(),
)

users = Table(
    "users",
    metadata,
    Column("name", LONG_NAME, primary_key=True),
    Column("email", String(320), nullable=False, default="", index=True),
    Column("last_login_at", Float),
    *_of_record(),
)

memberships = Table(
    "memberships",
    metadata,
    Column("team", NAME, ForeignKey("teams.name", ondelete="CASCADE"), nullable=False),
    Column("user", LONG_NAME, ForeignKey("users.name", ondelete="CASCADE"), nullable=False, index=True),
    Column("role", String(16), nullable=False),
    PrimaryKeyConstraint("team", "user"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("name", NAME, primary_key=True),
    Column("sha256", String(64), nullable=False, unique=True),
    Column("team", NAME, ForeignKey("teams.name"), nullable=False, index=True),
    Column("user", LONG_NAME, nullable=False, default="", index=True),
    Column("created_by", LONG_NAME, nullable=False, default=""),
    Column("request", String(160), nullable=False, default=""),
    Column("last_used_at", Float),
    *_of_record(),
)
"""API keys. `request`: idempotency key of the request that made the key or rotated it last, so that one whose reply was
lost can be repeated. `last_used_at`: of calls whose usage is no longer kept."""

aliases = Table(
    "aliases",
    metadata,
    Column("name", LONG_NAME, primary_key=True),
    *_of_record(),
)

prices = Table(
    "prices",
    metadata,
    Column("model", LONG_NAME, nullable=False),
    Column("valid_from", Float, nullable=False),
    Column("record", Text, nullable=False),
    PrimaryKeyConstraint("model", "valid_from"),
)

facts = Table(
    "facts",
    metadata,
    Column("name", NAME, primary_key=True),
    Column("value", Text, nullable=False),
)
"""Single values of the whole installation, such as the currency."""

audit = Table(
    "audit",
    metadata,
    Column("number", SERIAL, primary_key=True, autoincrement=False),
    Column("at", Float, nullable=False, index=True),
    Column("actor", LONG_NAME, nullable=False, index=True),
    Column("address", String(64), nullable=False),
    Column("request_id", String(128), nullable=False),
    Column("action", String(64), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("subject", LONG_NAME, nullable=False),
    Column("team", NAME, nullable=False, default="", index=True),
    Column("before", Text),
    Column("after", Text),
    Column("previous_hash", String(64), nullable=False),
    Column("hash", String(64), nullable=False),
    Index(None, "kind", "subject"),
)
"""Every change of access, never changed itself. `hash` covers the row and `previous_hash`, so rows form a chain."""


def _unlike(name: str, value: str) -> ColumnElement[bool]:
    # Quoted: PostgreSQL has a function `user`. A migration is written on SQLite, which has none.
    return column(quoted_name(name, quote=True)) != literal_column(f"'{value}'")


MOSTLY = {"user": _unlike("user", ""), "end_user": _unlike("end_user", ""), "outcome": _unlike("outcome", "ok")}
"""Column of `usage` that has one value in most rows -> the condition that leaves those out of its index. A query uses
the index only if it has the same condition, word for word."""


def _index_where(name: str, condition: ColumnElement[bool]) -> Index:
    return Index(None, name, "ended_at", "id", sqlite_where=condition, postgresql_where=condition)


usage = Table(
    "usage",
    metadata,
    Column("id", SERIAL, primary_key=True, autoincrement=True),
    Column("process", String(32), nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("request_id", String(128), nullable=False),
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float, nullable=False),
    Column("route", String(64), nullable=False),
    Column("outcome", String(48), nullable=False),
    Column("status", Integer, nullable=False),
    Column("organisation", NAME, nullable=False),
    Column("team", NAME, nullable=False),
    Column("key", NAME, nullable=False),
    Column("user", LONG_NAME, nullable=False),
    Column("end_user", LONG_NAME, nullable=False),
    Column("alias", LONG_NAME, nullable=False),
    Column("model", LONG_NAME, nullable=False),
    Column("adapter", LONG_NAME, nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("cached_tokens", Integer, nullable=False),
    Column("completion_tokens", Integer, nullable=False),
    Column("media_tokens", Integer, nullable=False),
    Column("queue_ms", Integer, nullable=False),
    Column("compute_ms", Integer, nullable=False),
    Column("cost_nano", BigInteger, nullable=False),
    Column("trace_id", String(32), nullable=False),
    UniqueConstraint("process", "number"),
    Index(None, "ended_at", "id"),
    *(Index(None, name, "ended_at", "id") for name in ("team", "key", "alias", "model", "request_id")),
    *(_index_where(name, condition) for name, condition in MOSTLY.items()),
)
"""One row per call, in the order in which they were written."""


def _sums() -> tuple[Column[int], ...]:
    names = (
        *("num_calls", "num_failed", "prompt_tokens", "cached_tokens", "completion_tokens", "media_tokens"),
        *("queue_ms", "compute_ms", "cost_nano"),
    )
    return tuple(Column(name, BigInteger, nullable=False, default=0) for name in names)


usage_hours = Table(
    "usage_hours",
    metadata,
    Column("hour", BigInteger, nullable=False),
    Column("organisation", NAME, nullable=False),
    Column("team", NAME, nullable=False),
    Column("key", NAME, nullable=False),
    Column("user", LONG_NAME, nullable=False),
    Column("alias", LONG_NAME, nullable=False),
    Column("model", LONG_NAME, nullable=False),
    Column("adapter", LONG_NAME, nullable=False),
    *_sums(),
    PrimaryKeyConstraint("hour", "organisation", "team", "key", "user", "alias", "model", "adapter"),
    sqlite_with_rowid=False,
)
"""Sums per hour (unix time of its begin) and whoever called what."""

usage_days = Table(
    "usage_days",
    metadata,
    Column("day", BigInteger, nullable=False),
    Column("organisation", NAME, nullable=False),
    Column("team", NAME, nullable=False),
    Column("model", LONG_NAME, nullable=False),
    *_sums(),
    PrimaryKeyConstraint("day", "organisation", "team", "model"),
    sqlite_with_rowid=False,
)
"""Sums per day (unix time of its begin, UTC), team and model: small enough for a year of charge-back."""

usage_months = Table(
    "usage_months",
    metadata,
    Column("month", BigInteger, nullable=False),
    Column("organisation", NAME, nullable=False),
    Column("team", NAME, nullable=False),
    Column("model", LONG_NAME, nullable=False),
    *_sums(),
    PrimaryKeyConstraint("month", "team", "model", "organisation"),
    sqlite_with_rowid=False,
)
"""The same per month, in the order of their groups: a month of a thousand teams is summed up in milliseconds."""

usage_end_users = Table(
    "usage_end_users",
    metadata,
    Column("day", BigInteger, nullable=False),
    Column("team", NAME, nullable=False),
    Column("end_user", LONG_NAME, nullable=False),
    *_sums(),
    PrimaryKeyConstraint("day", "team", "end_user"),
    sqlite_with_rowid=False,
)
"""Sums per day of the end users that trusted keys named."""

budget_periods = Table(
    "budget_periods",
    metadata,
    Column("kind", String(16), nullable=False),
    Column("subject", LONG_NAME, nullable=False),
    Column("period", String(8), nullable=False),
    Column("time_zone", String(64), nullable=False),
    Column("begins_at", BigInteger, nullable=False),
    Column("ends_at", BigInteger, nullable=False),
    Column("spent_nano", BigInteger, nullable=False, default=0),
    Column("warned", JSON, nullable=False, default=list),
    PrimaryKeyConstraint("kind", "subject", "period", "time_zone", "begins_at"),
)
"""The money that a subject with a budget has spent per period. `warned`: the amounts (in billionths) at whose passing
was warned; each belongs to a threshold of a budget."""

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", SERIAL, primary_key=True, autoincrement=True),
    Column("body", LargeBinary, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("next_at", Float, nullable=False, index=True),
    Column("num_tries", Integer, nullable=False, default=0),
    Column("is_done", Boolean, nullable=False, default=False),
)
"""Webhooks to deliver: an event is stored with the change that caused it, and sent until it is taken or given up."""

sessions = Table(
    "sessions",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("value", Text, nullable=False),
    Column("expires_at", Float, nullable=False, index=True),
)
"""Sign-ons under way (state, nonce, PKCE verifier; device codes). `id` is the SHA-256 of what the browser holds."""
