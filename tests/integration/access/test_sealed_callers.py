"""The caller that a gateway seals for the accounts service: with the address and scheme that trusted proxies tell."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from accounts.protocol.caller import HEADER, Caller, open_caller, seal_caller
from tests.support.stack import Stack

PROXY = "127.0.9.9"
FORWARDED = {"x-forwarded-for": "203.0.113.9", "x-forwarded-proto": "https"}


@asynccontextmanager
async def accounts_service(secret: str) -> AsyncIterator[tuple[str, list[Caller]]]:
    """A server in place of the accounts service: its URL, and the callers that it was told of."""
    told: list[Caller] = []

    async def answer(request: web.Request) -> web.Response:
        assert len(request.headers.getall(HEADER)) == 1
        told.append(open_caller(request.headers[HEADER], secret, time.time()))
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", told
    finally:
        await runner.cleanup()


async def ask(url: str, key: str, peer: str, headers: dict[str, str]) -> int:
    connector = aiohttp.TCPConnector(local_addr=(peer, 0))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get(url, headers={"Authorization": f"Bearer {key}", **headers}) as response,
    ):
        return response.status


async def test_the_accounts_service_is_told_who_calls_and_from_where() -> None:
    with Stack() as stack:
        async with accounts_service(stack.gateway_secret) as (accounts_url, told):
            gateway = await asyncio.to_thread(
                stack.gateway, wait=False, accounts_url=accounts_url, trusted_proxies=PROXY
            )
            async with asyncio.timeout(20):
                while "gateway ready" not in gateway.text():  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)
            url = f"{gateway.url}/admin/whoami"
            forged = {HEADER: seal_caller(Caller(key="forged", role="admin", at=time.time()), "guessed")}
            assert await ask(url, stack.key, PROXY, FORWARDED | forged) == 200
            assert await ask(url, stack.key, "127.0.3.3", FORWARDED | {HEADER.upper(): "forged"}) == 200
    host = gateway.url.removeprefix("http://")
    assert [(caller.key, caller.role, caller.address, caller.url) for caller in told] == [
        ("first", "admin", "203.0.113.9", f"https://{host}"),
        ("first", "admin", "127.0.3.3", f"http://{host}"),
    ]
