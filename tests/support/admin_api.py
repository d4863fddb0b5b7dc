"""The accounts service in the process of a test, asked as gateways ask it: with sealed callers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from accounts.app import Accounts, build
from accounts.protocol.caller import HEADER, Caller, seal_caller
from accounts.settings import AccountsSettings
from workers.redis.link import connect

SECRET = "secret-of-gateways"
ADMIN = Caller(key="first", team="default", organisation="default", role="admin", address="192.0.2.7")


@dataclass(slots=True)
class AdminApi:
    """The API. `caller` is who asks unless a request names another."""

    accounts: Accounts
    client: httpx2.AsyncClient
    caller: Caller = ADMIN

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        caller: Caller | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx2.Response:
        asking = caller or self.caller
        told = {HEADER: sealed(asking), **(headers or {})}
        return await self.client.request(method, path, json=body, headers=told)

    async def get(self, path: str, caller: Caller | None = None) -> Any:
        return _json(await self.ask("GET", path, caller=caller), 200)

    async def post(self, path: str, body: object = None, caller: Caller | None = None, **headers: str) -> Any:
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        return _json(await self.ask("POST", path, body, caller, told), 200, 201)

    async def patch(self, path: str, body: object, caller: Caller | None = None) -> Any:
        return _json(await self.ask("PATCH", path, body, caller), 200)

    async def delete(self, path: str, caller: Caller | None = None) -> Any:
        return _json(await self.ask("DELETE", path, caller=caller), 200)

    async def refused(
        self, status: int, method: str, path: str, body: object = None, caller: Caller | None = None
    ) -> Any:
        """The error of a request that is refused with this status."""
        answer = await self.ask(method, path, body, caller)
        assert answer.status_code == status, answer.text
        return answer.json()["error"]


def caller_of(key: str, team: str, role: Any, user: str = "") -> Caller:
    return Caller(key=key, user=user, team=team, organisation="default", role=role, address="192.0.2.9")


@asynccontextmanager
async def serving(database_url: str, redis_url: str, state_dir: Path, **settings: Any) -> AsyncIterator[AdminApi]:
    """Run an accounts service of the block's length; it is ready once its database is."""
    redis = connect(redis_url, timeout_s=2.0, retries=0)
    values = AccountsSettings.model_construct(
        **{
            **{name: field.default for name, field in AccountsSettings.model_fields.items()},
            "gateway_secret": SECRET,
            "database_url": database_url,
            "state_dir": state_dir,
            **settings,
        }
    )
    accounts = build(values, redis)
    transport = httpx2.ASGITransport(accounts.asgi, raise_app_exceptions=True)
    try:
        async with (
            accounts.running(),
            httpx2.AsyncClient(transport=transport, base_url="http://accounts", timeout=30) as client,
        ):
            yield AdminApi(accounts, client)
    finally:
        accounts.database.close()
        await redis.aclose()


async def wait_until_ready(api: AdminApi) -> None:
    """Return when the database has its tables and what every database has."""
    async with asyncio.timeout(20):
        while (await api.ask("GET", "/admin/teams/default")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def sealed(caller: Caller) -> str:
    """The header that a gateway sends for this caller now."""
    now = Caller(
        key=caller.key,
        of_settings=caller.of_settings,
        user=caller.user,
        team=caller.team,
        organisation=caller.organisation,
        role=caller.role,
        address=caller.address,
        request_id="req-test",
        url="http://gateway",
        at=time.time(),
    )
    return seal_caller(now, SECRET)


def _json(answer: httpx2.Response, *statuses: int) -> Any:
    assert answer.status_code in statuses, f"{answer.status_code}: {answer.text}"
    return answer.json()
