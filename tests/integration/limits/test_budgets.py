"""Budgets and limits by the admin API: an admin sets them, callers hit them, and what Redis lost is in the ledger."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import pytest
import redis

from accounts.protocol.records import digest
from tests.support.stack import Process, Stack
from workers.protocol import keys

MODEL = "small"
PATIENCE_S = 20.0
CALL_COST = 0.000_4
"""At a price of 100 per million generated tokens an answer of four costs so much; prompts are free."""
BUDGET = "b:month:Europe/Berlin"

STATIC_KEY, SPENDING_KEY = "pk-of-the-settings-0123456789", "pk-with-a-budget-0123456789"
STATIC: list[dict[str, Any]] = [
    {"name": "static", "team": "white", "sha256": digest(STATIC_KEY)},
    {
        "name": "spending",
        "sha256": digest(SPENDING_KEY),
        "limits": {"budgets": [{"amount": 2.5 * CALL_COST, "period": "month"}]},
    },
]
"""Keys of the settings."""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        running.fake_worker(MODEL, "--step-ms", "1", "--tokens", "4")
        accounts = running.accounts()
        for _ in range(2):
            gateway = running.gateway(accounts_url=accounts.url, api_keys=json.dumps(STATIC))
            running.wait_until_listed(gateway, MODEL)
        yield running


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


class Admin:
    """Asks the admin API, and for answers, at one gateway."""

    def __init__(self, session: aiohttp.ClientSession, gateway: Process, key: str) -> None:
        self._session, self.gateway, self._key = session, gateway, key

    async def ask(self, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, Any, Any]:
        headers = {"Authorization": f"Bearer {key or self._key}"}
        async with self._session.request(method, self.gateway.url + path, json=body, headers=headers) as answer:
            return answer.status, json.loads(await answer.read() or b"null"), answer.headers

    async def must(self, method: str, path: str, body: Any = None) -> Any:
        status, answer, _ = await self.ask(method, path, body)
        assert status < 300, answer
        return answer

    async def chat(self, key: str, **body: Any) -> tuple[int, Any, Any]:
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **body}
        return await self.ask("POST", "/v1/chat/completions", asked, key)

    async def until(self, is_so: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not await is_so():
            assert time.monotonic() < deadline, what
            await asyncio.sleep(0.05)


@pytest.fixture
async def admin(stack: Stack, session: aiohttp.ClientSession) -> Admin:
    asking = Admin(session, stack.gateways[0], stack.key)
    await asking.must("POST", "/admin/prices", {"model": "*", "per_million_completion": 100.0})
    return asking


async def make_key(admin: Admin, team: str, limits: dict[str, Any]) -> str:
    """A key of a new team with these limits, which the gateways know."""
    await admin.must("POST", "/admin/teams", {"name": team, "limits": limits})
    made = await admin.must("POST", "/admin/keys", {"name": f"key-of-{team}", "team": team})
    key: str = made["key"]

    async def is_known() -> bool:
        return (await admin.ask("GET", "/v1/models", key=key))[0] == 200

    await admin.until(is_known, "the key is known")
    await asyncio.sleep(1.0)  # the limits of its team, and prices, within the same second
    return key


def counted(stack: Stack, subject: str, field: str) -> int:
    with redis.Redis(unix_socket_path=str(stack.redis.socket)) as client:
        value: Any = client.hget(keys.limits_subject(subject), field)
        return int(value.split()[1]) if value else 0


async def test_a_team_spends_its_budget_and_is_refused_until_it_is_renewed(stack: Stack, admin: Admin) -> None:
    budget = {"amount": 3.5 * CALL_COST, "period": "month", "time_zone": "Europe/Berlin"}
    key = await make_key(admin, "red", {"budgets": [budget]})
    answers = [await admin.chat(key) for _ in range(5)]
    assert [status for status, _, _ in answers] == [200, 200, 200, 429, 429]
    _, body, headers = answers[-1]
    assert (body["error"]["code"], body["error"]["type"]) == ("budget_exceeded", "insufficient_quota")
    assert "team 'red' has spent 0.0012 USD of its 0.0014 USD of this month" in body["error"]["message"]
    assert "-01 00:00 (Europe/Berlin)" in body["error"]["message"]
    assert headers["x-should-retry"] == "false"
    nano = round(3 * CALL_COST * 1e9)
    assert counted(stack, "team:red", BUDGET) == nano

    async def is_in_ledger() -> bool:
        told = await admin.must("GET", "/admin/budgets?kind=team&name=red")
        return bool(told["data"]) and abs(told["data"][0]["spent"] - 3 * CALL_COST) < 1e-9

    await admin.until(is_in_ledger, "the ledger has what was counted")
    await admin.must("PATCH", "/admin/teams/red", {"limits": {"budgets": [{**budget, "amount": 1.0}]}})

    async def is_admitted() -> bool:
        return (await admin.chat(key))[0] == 200

    await admin.until(is_admitted, "a raised budget admits calls")


async def test_a_limit_of_a_team_holds_for_all_of_its_keys_at_all_gateways(stack: Stack, admin: Admin) -> None:
    key = await make_key(admin, "blue", {"requests_per_minute": 4})
    other = (await admin.must("POST", "/admin/keys", {"name": "another-of-blue", "team": "blue"}))["key"]
    await asyncio.sleep(1.0)
    statuses = [(await admin.chat(key))[0] for _ in range(2)]
    admin.gateway = stack.gateways[1]
    statuses += [(await admin.chat(other))[0] for _ in range(3)]
    assert statuses == [200, 200, 200, 200, 429]


async def test_a_limit_of_a_model_name_holds_for_all_callers(stack: Stack, admin: Admin) -> None:
    key = await make_key(admin, "green", {})
    await admin.must("POST", "/admin/aliases", {"name": MODEL, "limits": {"max_tokens": 2}})

    async def is_bounded() -> bool:
        _, body, _ = await admin.chat(key, max_tokens=None)
        return bool(body["usage"]["completion_tokens"] == 2)

    await admin.until(is_bounded, "answers of the model are bounded")
    await admin.must("DELETE", f"/admin/aliases/{MODEL}")


async def test_what_redis_and_all_gateways_have_forgotten_is_in_the_ledger(stack: Stack, admin: Admin) -> None:
    budget = {"amount": 3.5 * CALL_COST, "period": "month", "time_zone": "Europe/Berlin"}
    key = await make_key(admin, "grey", {"budgets": [budget], "tokens_per_month": 100_000})
    for _ in range(3):
        assert (await admin.chat(key))[0] == 200
    nano = round(3 * CALL_COST * 1e9)

    async def is_in_ledger() -> bool:
        told = await admin.must("GET", "/admin/budgets?kind=team&name=grey")
        return bool(told["data"]) and told["data"][0]["spent"] > 2.9 * CALL_COST

    await admin.until(is_in_ledger, "the ledger has what was counted")
    month = counted(stack, "team:grey", "m")
    with redis.Redis(unix_socket_path=str(stack.redis.socket)) as client:
        client.delete(keys.limits_subject("team:grey"))
        client.delete(keys.LIMITS_ROUND)  # as in a Redis that was restarted without its data

    async def is_raised() -> bool:
        return counted(stack, "team:grey", BUDGET) >= nano and counted(stack, "team:grey", "m") == month

    await admin.until(is_raised, "the counters are as the ledger has them")
    assert (await admin.chat(key))[0] == 429


async def test_keys_of_the_settings_count_for_their_team(stack: Stack, admin: Admin) -> None:
    """They share its limits and budget with its other keys, and are blocked with it."""
    key = await make_key(admin, "white", {"requests_per_minute": 4, "budgets": [{"amount": 1.0, "period": "month"}]})
    statuses = [(await admin.chat(one))[0] for one in (STATIC_KEY, key, STATIC_KEY, STATIC_KEY, STATIC_KEY, key)]
    assert statuses == [200, 200, 200, 200, 429, 429]

    async def is_in_ledger() -> bool:
        (budget,) = (await admin.must("GET", "/admin/budgets?kind=team&name=white"))["data"]
        return bool(abs(budget["spent"] - 4 * CALL_COST) < 1e-9)

    await admin.until(is_in_ledger, "the team's budget has what the key of the settings spent")
    await admin.must("POST", "/admin/teams/white/block")

    async def is_blocked() -> bool:
        return (await admin.chat(STATIC_KEY))[0] == 403

    await admin.until(is_blocked, "the key of the settings is blocked with its team")


async def test_a_key_of_the_settings_has_a_budget_that_only_gateways_know(stack: Stack, admin: Admin) -> None:
    statuses = []
    for _ in range(4):
        status, body, _ = await admin.chat(SPENDING_KEY)
        statuses.append(status)
        await asyncio.sleep(0.1)
    assert statuses == [200, 200, 429, 429]
    assert body["error"]["code"] == "budget_exceeded"
    assert (await admin.must("GET", "/admin/budgets?kind=key&name=spending"))["data"] == []
    assert (await admin.ask("GET", "/admin/keys/spending"))[0] == 404

    async def is_in_ledger() -> bool:
        return len((await admin.must("GET", "/admin/usage?key=spending"))["data"]) == 2

    await admin.until(is_in_ledger, "its calls are in the ledger as any")
