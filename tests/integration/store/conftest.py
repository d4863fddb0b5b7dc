"""Every test of the store runs on each Redis there is; afterwards the data must be whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis.asyncio

from gateway.store.client import connect
from gateway.store.integrity import check_integrity
from tests.support.redis_server import RedisServer, redis_binaries, redis_version


@pytest.fixture(scope="session", params=redis_binaries(), ids=redis_version)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    binary: Path = request.param
    with RedisServer(binary) as running:
        yield running


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    """Connected to an empty Redis; model `m` is checked at the end."""
    async with connect(server.url) as connected:
        await connected.flushall()
        yield connected
        await check_integrity(connected, "m")
