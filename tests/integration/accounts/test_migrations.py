"""The tables that migrations make are those of the schema, however many processes make them at once."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import select, text

from accounts.database.database import Database, open_database
from accounts.database.schema import facts, metadata
from accounts.database.upgrade import DatabaseTooNew, SchemaKeeper, upgrade
from accounts.errors import DatabaseAway
from tests.support.databases import Backend, Databases


def test_the_migrated_database_is_what_the_schema_says(database: Database) -> None:
    with database.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


def test_a_second_start_changes_nothing(database: Database) -> None:
    with database.transaction() as connection:
        connection.execute(facts.insert().values(name="currency", value="EUR"))
    upgrade(database)
    with database.reading() as connection:
        assert connection.execute(select(facts.c.value)).scalars().all() == ["EUR"]


def test_services_that_start_at_once_make_one_database(databases: Databases, backend: Backend, tmp_path: Path) -> None:
    url = databases.url(backend, tmp_path)
    opened = [open_database(url, tmp_path) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(upgrade, opened))
    with opened[0].reading() as connection:
        assert connection.execute(text("SELECT count(*) FROM alembic_version")).scalar_one() == 1
    for database in opened:
        database.close()


def test_the_database_of_a_later_version_is_refused(database: Database) -> None:
    with database.transaction() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DatabaseTooNew, match="later Paddock"):
        upgrade(database)


async def test_a_database_that_is_away_is_waited_for(databases: Databases, tmp_path: Path) -> None:
    server = databases.postgres
    database = open_database(databases.url("postgresql", tmp_path), tmp_path)
    server.kill()
    prepared: list[bool] = []
    keeper = SchemaKeeper(database, lambda: prepared.append(database.is_ready))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await keeper.run()
    with pytest.raises(DatabaseAway), database.reading():
        pass
    server.start()
    async with asyncio.timeout(20):
        await keeper.run()
    assert prepared == [True]
    with database.reading() as connection:
        assert connection.execute(select(facts)).all() == []
    database.close()
