"""Databases for tests of the accounts service: SQLite and PostgreSQL, each empty or with all tables."""

from __future__ import annotations

import shutil
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from accounts.database.database import Database, open_database
from accounts.database.upgrade import upgrade
from tests.support.postgres import PostgresServer

Backend = Literal["sqlite", "postgresql"]
BACKENDS: tuple[Backend, ...] = ("sqlite", "postgresql")


class Databases:
    """Makes databases; the PostgreSQL server is started with the first that needs it.

    One that has all tables is a copy: making them takes longer than most tests."""

    def __init__(self) -> None:
        self._postgres: PostgresServer | None = None
        self._folder = TemporaryDirectory(prefix="pd-databases-")

    @property
    def postgres(self) -> PostgresServer:
        if self._postgres is None:
            self._postgres = PostgresServer().__enter__()
        return self._postgres

    def url(self, backend: Backend, folder: Path) -> str:
        """The URL of a new, empty database."""
        return f"sqlite:///{folder / 'accounts.sqlite'}" if backend == "sqlite" else self.postgres.make_database()

    def url_with_tables(self, backend: Backend, folder: Path) -> str:
        """The URL of a new database with all tables, and nothing in them."""
        if backend == "postgresql":
            return self.postgres.make_database(self._postgres_template)
        return f"sqlite:///{shutil.copyfile(self._sqlite_template, folder / 'accounts.sqlite')}"

    def make(self, backend: Backend, folder: Path) -> Database:
        """A new database with all tables."""
        return open_database(self.url_with_tables(backend, folder), folder)

    @cached_property
    def _postgres_template(self) -> str:
        url = self.postgres.make_database()
        _make_tables(url, Path(self._folder.name))
        return url.partition("@/")[2].partition("?")[0]

    @cached_property
    def _sqlite_template(self) -> Path:
        folder = Path(self._folder.name)
        _make_tables(f"sqlite:///{folder / 'template.sqlite'}", folder)
        return folder / "template.sqlite"

    def close(self) -> None:
        self._folder.cleanup()
        if self._postgres is not None:
            self._postgres.__exit__(None, None, None)


def _make_tables(url: str, folder: Path) -> None:
    database = open_database(url, folder)
    upgrade(database)
    database.close()
