"""One PostgreSQL and one Redis for the tests of this folder; each test has a database of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis.asyncio

from accounts.database.database import Database
from tests.support.admin_api import AdminApi, serving, wait_until_ready
from tests.support.databases import BACKENDS, Backend, Databases
from tests.support.redis_server import RedisServer
from workers.redis.link import connect


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


@pytest.fixture(scope="package")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
async def mirror(redis_server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    """The Redis that gateways read, emptied before each test."""
    async with connect(redis_server.url, timeout_s=5, retries=0) as client:
        await client.flushall()
        yield client


@pytest.fixture
async def api(
    databases: Databases,
    backend: Backend,
    redis_server: RedisServer,
    mirror: redis.asyncio.Redis,
    tmp_path: Path,
) -> AsyncIterator[AdminApi]:
    """A running accounts service, on SQLite and on PostgreSQL."""
    url = databases.url_with_tables(backend, tmp_path)
    async with serving(url, redis_server.url_of("gateway"), tmp_path) as running:
        await wait_until_ready(running)
        yield running
