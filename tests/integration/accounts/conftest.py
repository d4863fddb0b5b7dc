"""One PostgreSQL and one Redis for the tests of this folder; each test has a database of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from accounts.database.database import Database
from tests.support.databases import BACKENDS, Backend, Databases


@pytest.fixture(scope="package")
def databases() -> Iterator[Databases]:
    made = Databases()
    yield made
    made.close()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.param
    return found


@pytest.fixture
def database(databases: Databases, backend: Backend, tmp_path: Path) -> Iterator[Database]:
    """An empty database with all tables, on SQLite and on PostgreSQL."""
    made = databases.make(backend, tmp_path)
    yield made
    made.close()
