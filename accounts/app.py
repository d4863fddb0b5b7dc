"""The composition root of the accounts service: builds all its parts and connects them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import redis.asyncio
from starlette.types import ASGIApp

from accounts.api.api import WHOAMI, build_api
from accounts.database.database import Database, open_database
from accounts.settings import AccountsSettings
from workers import secret_file


class Part(Protocol):
    """A part of the service that works in the background until it is cancelled."""

    async def run(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Accounts:
    """One accounts service. `asgi` answers requests only inside an `async with running()` block."""

    asgi: ASGIApp
    database: Database
    parts: tuple[Part, ...]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the background parts while the caller's block runs; a part that fails ends the block."""
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(part.run()) for part in self.parts]
            try:
                yield
            finally:
                for task in background:
                    task.cancel()


def build(settings: AccountsSettings, redis: redis.asyncio.Redis) -> Accounts:
    """Build an accounts service. Raises DatabaseUnusable, OSError (the state folder can't be written)."""
    secret = settings.gateway_secret or secret_file.made_once(settings.state_dir / secret_file.GATEWAY_SECRET)
    database = open_database(settings.database_url, settings.state_dir)
    return Accounts(build_api((WHOAMI,), secret), database, ())
