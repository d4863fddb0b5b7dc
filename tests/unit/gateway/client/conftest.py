"""A server that a test writes the lines of, and clients of it, which need not load the authorities of the web."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from gateway.client import AsyncClient, Client
from tests.support.scripted_server import ScriptedServer, scripted_server

KEY = "pk-of-this-test"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.url, KEY, timeout=5, verify_ssl=False) as opened:
        yield opened


@pytest.fixture
async def async_client(server: ScriptedServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.url, KEY, timeout=5, verify_ssl=False) as opened:
        yield opened
