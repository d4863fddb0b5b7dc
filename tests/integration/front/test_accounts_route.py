"""What a gateway takes in for the accounts service: bodies are counted, and no team has the service for itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from accounts.protocol.records import digest
from gateway.api.operations.accounts import ASKED_AT_ONCE, MAX_BODY_BYTES, MAX_OPEN_BODY_BYTES
from tests.support.stack import Process, Stack

RED, RED_TOO, BLUE = (f"pk-{name}-0123456789" for name in ("red", "red-too", "blue"))
RECORDS = [
    {"name": "red", "team": "red", "sha256": digest(RED)},
    {"name": "red-too", "team": "red", "sha256": digest(RED_TOO)},
    {"name": "blue", "team": "blue", "sha256": digest(BLUE)},
]
SOON_S = 10.0


@dataclass(slots=True)
class Service:
    """An accounts service in the test's process, which answers some paths when it is told to."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    num_asked: int = 0

    async def answer(self, request: web.Request) -> web.Response:
        if request.path == "/admin/slow":
            self.num_asked += 1
            await self.go.wait()
        return web.json_response({})


@pytest.fixture(scope="module")
def own_stack() -> Iterator[Stack]:
    with Stack() as running:
        running.fake_worker("small")
        running.gateway(api_keys=json.dumps(RECORDS), accounts_url=running.accounts_url)
        yield running


@pytest.fixture
def accounts_gateway(own_stack: Stack) -> Process:
    return own_stack.gateways[0]


@pytest.fixture
async def service(own_stack: Stack) -> AsyncIterator[Service]:
    found = Service()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", found.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, own_stack.accounts_socket).start()
    yield found
    found.go.set()
    await runner.cleanup()


async def head_sent(gateway: Process, path: str, num_bytes: int, key: str = "") -> asyncio.StreamReader:
    """Send the head of a request, whose body does not come."""
    parts = urlsplit(gateway.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    given = f"Authorization: Bearer {key}\r\n" if key else ""
    writer.write(f"POST {path} HTTP/1.1\r\nHost: gateway\r\n{given}Content-Length: {num_bytes}\r\n\r\n".encode())
    return reader


async def refused(reader: asyncio.StreamReader, within_s: float) -> int:
    """The status of an answer before the body; 0: there is none."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            return int((await reader.readline()).split()[1])
    return 0


async def test_who_has_no_key_sends_short_bodies_only(accounts_gateway: Process, service: Service) -> None:
    """Each connection could hold 8 MiB of the gateway's memory for a minute."""
    for path in ("/auth/token", "/auth/any/thing"):
        assert await refused(await head_sent(accounts_gateway, path, MAX_OPEN_BODY_BYTES + 1), SOON_S) == 413
    async with aiohttp.ClientSession() as session:
        data = b"x" * MAX_OPEN_BODY_BYTES
        async with session.post(f"{accounts_gateway.url}/auth/token", data=data) as response:
            assert response.status == 200


async def test_bodies_count_with_the_memory_of_their_key(accounts_gateway: Process, service: Service) -> None:
    readers = [await head_sent(accounts_gateway, "/admin/keys", MAX_BODY_BYTES, RED) for _ in range(16)]
    statuses = await asyncio.gather(*(refused(reader, 3.0) for reader in readers))
    assert 0 in statuses
    assert statuses.count(429) >= 4, statuses
    assert await refused(await head_sent(accounts_gateway, "/admin/keys", MAX_BODY_BYTES, BLUE), 1.0) == 0


async def test_one_team_leaves_the_service_to_others(
    own_stack: Stack, accounts_gateway: Process, service: Service
) -> None:
    async with aiohttp.ClientSession() as session:

        async def get(path: str, key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            async with session.get(f"{accounts_gateway.url}{path}", headers=headers) as response:
                return response.status

        held = [asyncio.create_task(get("/admin/slow", key)) for key in (RED, RED_TOO) for _ in range(6)]
        async with asyncio.timeout(SOON_S):
            while service.num_asked < ASKED_AT_ONCE:
                await asyncio.sleep(0.02)
            for key in (BLUE, own_stack.key):
                assert await get("/admin/quick", key) == 200
        assert service.num_asked == ASKED_AT_ONCE
        service.go.set()
        assert await asyncio.wait_for(asyncio.gather(*held), SOON_S) == [200] * len(held)
    assert service.num_asked == len(held)
