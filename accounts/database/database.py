"""Reaches the accounts database: connections, transactions, and whether it answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

BUSY_S = 30.0
"""Seconds for which a statement on SQLite waits for another writer."""
POOL_SIZE = 8
"""Maximum connections of this process to PostgreSQL."""
CONNECT_S = 5
STATEMENT_MS = 30_000
"""Maximum milliseconds of one statement on PostgreSQL."""


class DatabaseUnusable(ValueError):
    """The setting `database_url` can't be used; the message says why."""


class Database:
    """The accounts database: SQLite or PostgreSQL. Its methods block: call them on a thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Yield a connection with a transaction that writes; it is committed at the block's end unless it raises.

        On SQLite the write lock is taken at once: a lock that is only taken later can fail in the middle."""
        with self.engine.begin() as connection:
            if self.is_sqlite:
                connection.execute(text("BEGIN IMMEDIATE"))
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Yield a connection that sees one state of the database for the length of the block."""
        with self.engine.connect() as connection:
            if self.is_sqlite:
                connection.execute(text("BEGIN"))
            yield connection

    def close(self) -> None:
        self.engine.dispose()


def open_database(url: str, state_dir: Path) -> Database:
    """Return the database of a URL; an empty one is the file `accounts.sqlite` in the state folder.

    Nothing is connected yet. Raises DatabaseUnusable."""
    try:
        parsed = make_url(url or f"sqlite:///{state_dir.expanduser() / 'accounts.sqlite'}")
    except ArgumentError:
        raise DatabaseUnusable(
            "database_url is no URL; give sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE"
        ) from None
    if parsed.get_backend_name() == "sqlite":
        return Database(_sqlite(parsed))
    if parsed.get_backend_name() != "postgresql":
        raise DatabaseUnusable(f"database_url names {parsed.get_backend_name()}; SQLite and PostgreSQL are supported")
    parsed = parsed.set(drivername="postgresql+psycopg")
    options = f"-c statement_timeout={STATEMENT_MS} -c lock_timeout={STATEMENT_MS}"
    engine = create_engine(
        parsed,
        pool_size=POOL_SIZE,
        max_overflow=0,
        pool_pre_ping=True,
        pool_timeout=CONNECT_S,
        isolation_level="READ COMMITTED",
        connect_args={"connect_timeout": CONNECT_S, "options": options, "application_name": "paddock-accounts"},
    )
    return Database(engine)


def _sqlite(url: Any) -> Engine:
    engine = create_engine(url, connect_args={"timeout": BUSY_S, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:
        connection.isolation_level = None  # transactions begin where `Database` says so, not where the driver guesses
        # FULL: a record that gateways were told is written must survive a power failure.
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"busy_timeout={int(BUSY_S * 1e3)}"):
            connection.execute(f"PRAGMA {pragma}")

    return engine
