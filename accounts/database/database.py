"""Reaches the accounts database: connections, transactions, and whether it answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text, union_all
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DataError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnection

from accounts.errors import DatabaseAway

BUSY_S = 30.0
"""Seconds for which a statement on SQLite waits for another writer."""
POOL_SIZE = 8
"""Maximum connections of this process to PostgreSQL."""
CONNECT_S = 5
CLOSE_S = 5.0
STATEMENT_MS = 30_000
"""Maximum milliseconds of one statement on PostgreSQL."""


AWAY = (OperationalError, InterfaceError, NoConnection)
"""Errors of a database that is away or overloaded."""
UNFIT = (DataError, OverflowError)
"""Errors about values that a database can't hold or compare, such as texts with NUL and numbers of thirty digits."""


class DatabaseUnusable(ValueError):
    """The setting `database_url` can't be used; the message says why."""


class Database:
    """The accounts database: SQLite or PostgreSQL. Its methods block: call them on a thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_ready = True
        """Whether its tables are those of this version; while they are not, nothing can be read or written."""
        self._is_closed = False
        self._num_users = 0
        """Blocks that use a connection now."""
        self._changed = threading.Condition()

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def transaction(self, *, is_upgrade: bool = False) -> Iterator[Connection]:
        """Yield a connection with a transaction that writes; it is committed at the block's end unless it raises.

        On SQLite the write lock is taken at once: a lock that is only taken later can fail in the middle.
        `is_upgrade`: the database need not be ready. Raises DatabaseAway."""
        with self._used(is_upgrade), self.engine.begin() as connection:
            if self.is_sqlite:
                connection.execute(text("BEGIN IMMEDIATE"))
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Yield a connection that sees one state of the database for the length of the block. Raises DatabaseAway."""
        with self._used(is_upgrade=False), self.engine.connect() as connection:
            if self.is_sqlite:
                connection.execute(text("BEGIN"))
            yield connection

    def close(self) -> None:
        """Close all connections, once the threads that use some have ended their work. Blocks for CLOSE_S at most."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._num_users, CLOSE_S)
        self.engine.dispose()

    @contextmanager
    def _used(self, is_upgrade: bool) -> Iterator[None]:
        with self._changed:
            if self._is_closed or not (self.is_ready or is_upgrade):
                raise DatabaseAway("The accounts database is not there yet. Send the request again later.")
            self._num_users += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_users -= 1
                self._changed.notify_all()


def open_database(url: str, state_dir: Path) -> Database:
    """Return the database of a URL; an empty one is the file `accounts.sqlite` in the state folder.

    Nothing is connected yet. Raises DatabaseUnusable, OSError (the state folder can't be made)."""
    if not url:
        state_dir.expanduser().mkdir(mode=0o700, parents=True, exist_ok=True)
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


def united(selects: Sequence[Any]) -> Any:
    """Return the rows of all selects together, which have the same columns.

    The types are plain, since mypy 2.4 ends with an internal error over those of `union_all`."""
    together: Callable[..., Any] = union_all
    return together(*selects) if len(selects) > 1 else selects[0]
