"""What a gateway takes in for the accounts service: bodies are counted, and no team has the service for itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from accounts.protocol.records import digest
from gateway.api.operations.accounts import (
    ASKED_AT_ONCE,
    MAX_BODY_BYTES,
    MAX_OPEN_BODY_BYTES,
    MOST_OF_KEY,
    MOST_OF_TEAM,
    OPEN_AT_ONCE,
)
from tests.support.stack import Process, Stack
from tests.support.waiting import until

RED, RED_TOO, RED_THREE, BLUE = (f"pk-{name}-0123456789" for name in ("red", "red-too", "red-three", "blue"))
RECORDS = [
    {"name": "red", "team": "red", "sha256": digest(RED)},
    {"name": "red-too", "team": "red", "sha256": digest(RED_TOO)},
    {"name": "red-three", "team": "red", "sha256": digest(RED_THREE)},
    {"name": "blue", "team": "blue", "sha256": digest(BLUE)},
]
SOON_S = 10.0


@dataclass(slots=True)
class Service:
    """An accounts service in the test's process, which answers some paths when it is told to."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    num_asked: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/slow"):
            self.num_asked += 1
            await self.go.wait()
        if request.path == "/admin/export":
            self.num_asked += 1
            return await self._export(request)
        return web.json_response({})

    async def _export(self, request: web.Request) -> web.StreamResponse:
        """Answer with a beginning, and with the rest when it is told to."""
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"id\n")
        await self.go.wait()
        await response.write_eof()
        return response


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


async def refused(gateway: Process, path: str, num_bytes: int, within_s: float, key: str = "") -> int:
    """The status of a request whose body does not come; 0: it is waited for."""
    parts = urlsplit(gateway.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    given = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"POST {path} HTTP/1.1\r\nHost: gateway\r\n{given}Content-Length: {num_bytes}\r\n\r\n"
    try:
        writer.write(head.encode())
        async with asyncio.timeout(within_s):
            return int((await reader.readline()).split()[1])
    except TimeoutError:
        return 0
    finally:
        writer.close()


async def test_who_has_no_key_sends_short_bodies_only(accounts_gateway: Process, service: Service) -> None:
    """Each connection could hold 8 MiB of the gateway's memory for a minute."""
    for path in ("/auth/token", "/auth/any/thing"):
        assert await refused(accounts_gateway, path, MAX_OPEN_BODY_BYTES + 1, SOON_S) == 413
    async with aiohttp.ClientSession() as session:
        data = b"x" * MAX_OPEN_BODY_BYTES
        async with session.post(f"{accounts_gateway.url}/auth/token", data=data) as response:
            assert response.status == 200


async def test_bodies_count_with_the_memory_of_their_key(accounts_gateway: Process, service: Service) -> None:

    def held(key: str, within_s: float) -> asyncio.Task[int]:
        return asyncio.create_task(refused(accounts_gateway, "/admin/keys", MAX_BODY_BYTES, within_s, key))

    of_red = [held(RED, 4.0) for _ in range(16)]
    done, _ = await asyncio.wait(of_red, timeout=2.0)
    assert {task.result() for task in done} == {429}
    assert 4 <= len(done) < len(of_red)
    assert await held(BLUE, 1.0) == 0, "it may send its body"
    assert set(await asyncio.gather(*of_red)) == {0, 429}


async def test_exports_that_nobody_reads_keep_nobody_waiting(
    own_stack: Stack, accounts_gateway: Process, service: Service
) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session, AsyncExitStack() as held:

        async def export(key: str) -> tuple[int, str]:
            headers = {"Authorization": f"Bearer {key}"}
            response = await held.enter_async_context(
                session.get(f"{accounts_gateway.url}/admin/export", headers=headers)
            )
            return response.status, "" if response.status == 200 else await response.text()

        for key in (RED, RED_TOO):
            for _ in range(MOST_OF_KEY):
                assert (await export(key))[0] == 200
            status, told = await export(key)
            assert status == 429
            assert f"This key has {MOST_OF_KEY} requests to the accounts service under way" in told
        assert (await export(RED_THREE))[0] == 429, "its team has twice as many"
        assert (await export(BLUE))[0] == 200
        for _ in range(120):
            assert (await export(own_stack.key))[0] == 200, "an admin's own affair"
        assert service.num_asked == MOST_OF_TEAM + 121
        service.go.set()


async def test_one_team_leaves_the_service_to_others(
    own_stack: Stack, accounts_gateway: Process, service: Service
) -> None:
    async with aiohttp.ClientSession() as session:

        async def get(path: str, key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            async with session.get(f"{accounts_gateway.url}{path}", headers=headers) as response:
                return response.status

        held = [asyncio.create_task(get("/admin/slow", key)) for key in (RED, RED_TOO) for _ in range(4)]
        await until(lambda: service.num_asked == ASKED_AT_ONCE, SOON_S, "the first ones are asked")
        async with asyncio.timeout(SOON_S):
            for key in (BLUE, own_stack.key):
                assert await get("/admin/quick", key) == 200
        assert service.num_asked == ASKED_AT_ONCE
        service.go.set()
        assert await asyncio.wait_for(asyncio.gather(*held), SOON_S) == [200] * len(held)
    assert service.num_asked == len(held)


async def test_callers_without_a_key_leave_the_service_to_others(
    own_stack: Stack, accounts_gateway: Process, service: Service
) -> None:
    """As many as had a connection asked it at once, and everybody's requests waited behind theirs."""

    def session(address: str) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(accounts_gateway.url, connector=aiohttp.TCPConnector(local_addr=(address, 0)))

    async def status(asking: aiohttp.ClientSession, path: str, **headers: str) -> int:
        async with asking.get(path, headers=headers) as response:
            return response.status

    async with session("127.0.0.2") as crowd, session("127.0.0.3") as other:
        held = [asyncio.create_task(status(crowd, "/auth/slow")) for _ in range(3 * OPEN_AT_ONCE)]
        await until(lambda: service.num_asked == OPEN_AT_ONCE, SOON_S, "the first ones are asked")
        async with asyncio.timeout(SOON_S):
            assert await status(other, "/auth/quick") == 200, "of another address"
            assert await status(crowd, "/admin/quick", Authorization=f"Bearer {BLUE}") == 200, "with a key"
        assert service.num_asked == OPEN_AT_ONCE
        service.go.set()
        assert await asyncio.wait_for(asyncio.gather(*held), SOON_S) == [200] * len(held)
