"""Databases for tests of the accounts service: SQLite and PostgreSQL, each empty or with all tables."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from accounts.database.database import Database, open_database
from accounts.database.upgrade import upgrade
from tests.support.postgres import PostgresServer

Backend = Literal["sqlite", "postgresql"]
BACKENDS: tuple[Backend, ...] = ("sqlite", "postgresql")


class Databases:
    """Makes databases; the PostgreSQL server is started with the first that needs it."""

    def __init__(self) -> None:
        self._postgres: PostgresServer | None = None

    @property
    def postgres(self) -> PostgresServer:
        if self._postgres is None:
            self._postgres = PostgresServer().__enter__()
        return self._postgres

    def url(self, backend: Backend, folder: Path) -> str:
        """The URL of a new, empty database."""
        return f"sqlite:///{folder / 'accounts.sqlite'}" if backend == "sqlite" else self.postgres.make_database()

    def make(self, backend: Backend, folder: Path) -> Database:
        """A new database with all tables."""
        database = open_database(self.url(backend, folder), folder)
        upgrade(database)
        return database

    def close(self) -> None:
        if self._postgres is not None:
            self._postgres.__exit__(None, None, None)
