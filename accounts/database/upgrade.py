"""Upgrades the tables of the accounts database to those of this version; waits while the database is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from accounts.database.database import AWAY, Database

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "migrations"
LOCK = 0x70_61_64_64
"""Number of the PostgreSQL advisory lock that one process holds while it upgrades; the others wait for it."""
LOCK_WAIT_S = 600
"""Maximum seconds of an upgrade, and of the wait for another process's."""
RETRY_S = 2.0


class DatabaseTooNew(ValueError):
    """The database was made by a later version of Paddock."""


class SchemaKeeper:
    """Upgrades the database once it answers. Until then the database is not ready: whatever uses it is refused."""

    def __init__(self, database: Database, prepare: Callable[[], None]) -> None:
        """`prepare` makes what has to be in every database. It runs on a thread, after each upgrade."""
        self._database = database
        self._prepare = prepare
        database.is_ready = False

    async def run(self) -> None:
        """Return when the tables are those of this version. Raises DatabaseTooNew."""
        is_told = False
        while not self._database.is_ready:
            try:
                await asyncio.to_thread(upgrade, self._database)
                self._database.is_ready = True
                await asyncio.to_thread(self._prepare)
            except AWAY as error:
                self._database.is_ready = False
                if not is_told:
                    log.warning("the accounts database can't be reached (%s); trying again until it can", error)
                is_told = True
                await asyncio.sleep(RETRY_S)


def upgrade(database: Database) -> None:
    """Make or upgrade all tables, in one transaction. Several processes may do this at once: they wait for each other.

    Raises DatabaseTooNew, one of AWAY."""
    with database.transaction(is_upgrade=True) as connection:
        if not database.is_sqlite:  # on SQLite the transaction is the lock
            connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_WAIT_S}s'"))
            connection.execute(text(f"SET LOCAL statement_timeout = '{LOCK_WAIT_S}s'"))
            connection.execute(text(f"SELECT pg_advisory_xact_lock({LOCK})"))
        config = configuration(connection)
        script = ScriptDirectory.from_config(config)
        found = MigrationContext.configure(connection).get_current_revision()
        if found == script.get_current_head():
            return
        if found is not None and found not in {step.revision for step in script.walk_revisions()}:
            raise DatabaseTooNew(
                f"the accounts database has the tables of a later Paddock (step {found}); run that version, or restore "
                "a backup"
            )
        command.upgrade(config, "head")
        log.info("the accounts database has been upgraded", extra={"fields": {"from": found or "", "to": "head"}})


def configuration(connection: Connection) -> Config:
    """Return alembic's configuration for this connection."""
    config = Config()
    config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
