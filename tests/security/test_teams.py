"""Attackers who have a key: of another team, of few rights, of a budget that is spent; against a running fleet."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from yarl import URL

from accounts.protocol.caller import HEADER, Caller, seal_caller
from accounts.protocol.records import digest
from tests.support.stack import Stack

MODEL, SLOW, FAILING = "small", "slow", "failing"
STATIC_KEY = "pk-of-the-settings-0123456789"
CALL_COST = 0.000_4
"""At a price of 100 per million generated tokens an answer of four costs so much; prompts are free."""
OF_BLUE = "an-id-that-blue-has-chosen"
KNOWN_S = 1.2
"""Within which all gateways know of a change."""
PATIENCE_S = 20.0
NO_RIGHT = {400, 401, 403, 404, 405}


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    text: str
    headers: Mapping[str, str]

    @property
    def body(self) -> Any:
        return json.loads(self.text or "null")


@dataclass(slots=True)
class Fleet:
    """A gateway with an accounts service, two teams and their keys: name -> secret."""

    stack: Stack
    session: aiohttp.ClientSession
    keys: Mapping[str, str]

    @property
    def url(self) -> str:
        return self.stack.gateways[0].url

    async def ask(self, method: str, path: str, key: str = "", body: Any = None, **headers: str) -> Answer:
        """Ask with a key, by its name; "": the first key. The path is sent as it is."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        sent["Authorization"] = f"Bearer {self.keys.get(key, key) or self.stack.key}"
        url = URL(self.url + path, encoded=True)
        async with self.session.request(method, url, json=body, headers=sent, allow_redirects=False) as answer:
            return Answer(answer.status, await answer.text(), answer.headers)

    async def must(self, method: str, path: str, body: Any = None, key: str = "") -> Any:
        answer = await self.ask(method, path, key, body)
        assert answer.status < 300, answer
        return answer.body

    async def chat(self, key: str, model: str = MODEL, **more: Any) -> Answer:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **more}
        return await self.ask("POST", "/v1/chat/completions", key, body)

    async def rows(self, query: str, number: int = 1) -> list[dict[str, Any]]:
        """The calls of a query, as soon as the ledger has so many."""
        deadline = time.monotonic() + PATIENCE_S
        while len(found := (await self.must("GET", f"/admin/usage?{query}"))["data"]) < number:
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.1)
        rows: list[dict[str, Any]] = found
        return rows

    async def team(self, name: str, **limits: Any) -> str:
        """The secret of a key of a new team with these limits, which the gateway knows."""
        await self.must("POST", "/admin/teams", {"name": name, "limits": limits})
        made = await self.must("POST", "/admin/keys", {"name": f"{name}-key", "team": name})
        await asyncio.sleep(KNOWN_S)
        secret: str = made["key"]
        return secret


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    static = {"name": "ops", "team": "red", "sha256": digest(STATIC_KEY), "admin": True}
    with Stack() as running:
        running.fake_worker(MODEL, "--step-ms", "1", "--tokens", "4", slots=64)
        running.fake_worker(SLOW, "--step-ms", "20", "--tokens", "1000", "--prefill-ms", "1000", slots=64)
        running.fake_worker(FAILING, "--step-ms", "1", "--tokens", "20", "--fail-after", "3", slots=64)
        accounts = running.accounts()
        gateway = running.gateway(accounts_url=accounts.url, api_keys=json.dumps([static]))
        running.wait_until_listed(gateway, MODEL, SLOW, FAILING)
        yield running


KEYS: dict[str, str] = {}


@pytest.fixture
async def fleet(stack: Stack) -> AsyncIterator[Fleet]:
    """The fleet; its teams and keys are made by the first test, and there is a call of blue's."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        made = Fleet(stack, session, KEYS)
        if not KEYS:
            await set_up(made)
        yield made


async def set_up(fleet: Fleet) -> None:
    await fleet.must("POST", "/admin/prices", {"model": "*", "per_million_completion": 100.0})
    for team in ("red", "blue"):
        await fleet.must("POST", "/admin/teams", {"name": team, "limits": {"budgets": [{"amount": 1000}]}})
    await fleet.must("POST", "/admin/users", {"name": "ann@example.com", "teams": {"red": "user", "blue": "user"}})
    wanted: list[dict[str, Any]] = [
        {"name": "red-lead", "team": "red", "role": "manager"},
        {"name": "red-ci", "team": "red"},
        {"name": "blue-lead", "team": "blue", "role": "manager"},
        {"name": "blue-ci", "team": "blue"},
        {"name": "blue-ann", "team": "blue", "user": "ann@example.com"},
    ]
    for fields in wanted:
        KEYS[fields["name"]] = (await fleet.must("POST", "/admin/keys", fields))["key"]
    await asyncio.sleep(KNOWN_S)
    await fleet.must("PATCH", "/admin/keys/blue-ci", {"metadata": {"note": "of blue"}}, "blue-lead")
    for key in ("blue-ci", "blue-ann"):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        answer = await fleet.ask("POST", "/v1/chat/completions", key, body, x_request_id=f"{OF_BLUE}-{key}")
        assert answer.status == 200, answer
    await fleet.rows("team=blue", 2)


USAGE = (
    "/admin/usage",
    "/admin/usage?team=blue",
    "/admin/usage?key=blue-ci",
    "/admin/usage?user=ann@example.com",
    f"/admin/usage?request_id={OF_BLUE}-blue-ci",
    "/admin/usage?team=red&team=blue",
    "/admin/usage/summary?from=2020-01-01&group_by=team,key",
    "/admin/usage/summary?from=2020-01-01&group_by=team&team=blue",
    "/admin/usage/summary?from=2020-01-01&group_by=user,day",
    "/admin/usage/export?format=csv",
    "/admin/usage/export?format=csv&team=blue",
    "/spend/logs",
    "/spend/logs?user_id=ann@example.com",
    f"/spend/logs?request_id={OF_BLUE}-blue-ci",
    "/spend/logs?start_date=2020-01-01&end_date=2020-01-31&api_key=blue-ci",
    "/admin/budgets",
    "/admin/budgets?kind=team&name=blue",
    "/admin/budgets?kind=key&name=blue-ci",
)


@pytest.mark.parametrize("key", ["red-lead", "red-ci"])
async def test_nobody_reads_the_usage_of_another_team(fleet: Fleet, key: str) -> None:
    by_secret = f"/spend/logs?api_key={fleet.keys['blue-ci']}"
    for path in (*USAGE, by_secret, f"/spend/logs?api_key={digest(fleet.keys['blue-ci'])}"):
        answer = await fleet.ask("GET", path, key)
        assert answer.status in (200, 403), (path, answer)
        assert OF_BLUE not in answer.text, path
        assert "blue" not in answer.text, path


async def test_a_key_with_the_name_of_an_earlier_one_reads_nothing_of_it(fleet: Fleet) -> None:
    """A manager chooses names, and so that of a key which another team has deleted."""
    await fleet.must("POST", "/admin/keys", {"name": "nightly", "team": "blue"})
    secret = (await fleet.must("POST", "/admin/keys/nightly/rotate"))["key"]
    await asyncio.sleep(KNOWN_S)
    assert (await fleet.chat(secret)).status == 200
    await fleet.rows("key=nightly")
    await fleet.must("DELETE", "/admin/keys/nightly")
    secret = (await fleet.must("POST", "/admin/keys", {"name": "nightly"}, "red-lead"))["key"]
    await asyncio.sleep(KNOWN_S)
    assert (await fleet.ask("GET", "/admin/usage", secret)).body["data"] == []
    logs = await fleet.ask("GET", "/spend/logs", secret)
    assert (logs.status, logs.body) == (200, [])


async def test_a_manager_does_not_become_a_person_of_its_team(fleet: Fleet) -> None:
    """With a key of theirs it would read what they use in other teams, and spend their budgets."""
    person = "ann@example.com"
    tries: list[tuple[str, str, Any]] = [
        ("POST", "/admin/keys", {"user": person}),
        ("PATCH", "/admin/keys/red-ci", {"user": person}),
        ("POST", "/key/generate", {"user_id": person}),
        ("POST", "/key/update", {"key": "red-ci", "user_id": person}),
        ("POST", "/key/red-ci/regenerate", {"user_id": person}),
        ("POST", "/user/new", {"user_id": person}),
    ]
    for method, path, body in tries:
        assert (await fleet.ask(method, path, "red-lead", body)).status == 403, path


@pytest.mark.parametrize("query", ["", "?team=blue", "?subject=blue-ci", "?actor=key:blue-lead", "?kind=key&team=blue"])
async def test_nobody_reads_the_audit_of_another_team(fleet: Fleet, query: str) -> None:
    assert "blue-lead" in (await fleet.ask("GET", "/admin/audit?subject=blue-ci", "blue-lead")).text
    answer = await fleet.ask("GET", f"/admin/audit{query}", "red-lead")
    assert answer.status == 200
    assert "blue" not in json.dumps([entry for entry in answer.body["data"] if entry["subject"] != "red-lead"])
    assert (await fleet.ask("GET", f"/admin/audit{query}", "red-ci")).status == 403
    assert (await fleet.ask("GET", "/admin/audit/verify", "red-lead")).status == 403


WRITES: tuple[tuple[str, str, Any], ...] = (
    ("PATCH", "/admin/keys/blue-ci", {"metadata": {}}),
    ("DELETE", "/admin/keys/blue-ci", None),
    ("POST", "/admin/keys/blue-ci/rotate", None),
    ("POST", "/admin/keys/blue-ci/block", None),
    ("PATCH", "/admin/teams/blue", {"limits": None}),
    ("DELETE", "/admin/teams/blue?with_keys=true", None),
    ("POST", "/admin/teams/blue/block", None),
    ("POST", "/admin/apply", {"teams": [{"name": "blue"}]}),
    ("POST", "/admin/apply?dry_run=true&prune=true", {}),
    ("POST", "/admin/prices", {"model": "*"}),
    ("PUT", "/admin/prices/currency", {"currency": "XXX"}),
    ("POST", "/key/update", {"key": "blue-ci", "max_budget": 1}),
    ("POST", "/key/block", {"key": "blue-ci"}),
    ("POST", "/key/delete", {"keys": ["blue-ci"]}),
    ("POST", "/key/blue-ci/regenerate", {}),
    ("POST", "/team/update", {"team_id": "blue", "blocked": True}),
    ("POST", "/team/delete", {"team_ids": ["blue"]}),
    ("GET", "/key/info?key=blue-ci", None),
    ("GET", "/team/info?team_id=blue", None),
    ("GET", "/admin/keys/blue-ci", None),
    ("GET", "/admin/teams/blue", None),
)


@pytest.mark.parametrize("key", ["red-lead", "red-ci"])
async def test_nobody_changes_what_is_another_teams(fleet: Fleet, key: str) -> None:
    before = await fleet.must("GET", "/admin/keys/blue-ci"), await fleet.must("GET", "/admin/teams/blue")
    for method, path, body in WRITES:
        answer = await fleet.ask(method, path, key, body)
        assert answer.status in (403, 404), (path, answer)
    secret = fleet.keys["blue-ci"]
    for path in (f"/key/info?key={secret}", f"/key/info?key={digest(secret)}"):
        assert (await fleet.ask("GET", path, key)).status == 404
    after = await fleet.must("GET", "/admin/keys/blue-ci"), await fleet.must("GET", "/admin/teams/blue")
    assert [one["version"] for one in after] == [one["version"] for one in before]


RAISES: tuple[tuple[str, str, Any], ...] = (
    ("PATCH", "/admin/keys/{own}", {"role": "admin"}),
    ("PATCH", "/admin/keys/{own}", {"admin": True}),
    ("PATCH", "/admin/keys/{own}", {"limits": {"budgets": [{"amount": 100_000}]}}),
    ("PATCH", "/admin/keys/{own}", {"weight": 100}),
    ("POST", "/admin/keys", {"role": "admin"}),
    ("POST", "/admin/keys", {"team": "blue"}),
    ("POST", "/admin/keys", {"team": "blue", "role": "manager"}),
    ("POST", "/admin/users", {"name": "eve", "admin": True}),
    ("PATCH", "/admin/users/ann@example.com", {"admin": True}),
    ("POST", "/key/update", {"key": "{own}", "max_budget": 100_000, "budget_duration": "30d"}),
    ("POST", "/key/update", {"key": "{own}", "team_id": "blue"}),
    ("POST", "/key/generate", {"team_id": "blue"}),
    ("POST", "/key/generate", {"max_budget": 100_000, "budget_duration": "30d"}),
    ("POST", "/key/{own}/regenerate", {"max_budget": 100_000, "budget_duration": "30d"}),
    ("POST", "/user/new", {"user_id": "eve", "user_role": "proxy_admin"}),
    ("POST", "/team/update", {"team_id": "red", "max_budget": 100_000, "budget_duration": "30d"}),
)


@pytest.mark.parametrize("key", ["red-lead", "red-ci"])
async def test_nobody_gives_themselves_more(fleet: Fleet, key: str) -> None:
    before = await fleet.must("GET", f"/admin/keys/{key}")
    for method, path, body in RAISES:
        told = json.loads(json.dumps(body).replace("{own}", key))
        answer = await fleet.ask(method, path.replace("{own}", key), key, told)
        assert answer.status in (400, 403), (path, answer)
    assert (await fleet.must("GET", f"/admin/keys/{key}"))["version"] == before["version"]
    assert (await fleet.ask("GET", "/admin/whoami", key)).body["role"] == before["role"]


async def test_a_header_does_not_say_who_asks(fleet: Fleet) -> None:
    """The accounts service hears of a caller from the gateway's own header, and by its seal."""
    now = time.time()
    forged = seal_caller(Caller(key="first", team="default", role="admin", at=now), "a guess")
    true = seal_caller(Caller(key="first", team="default", role="admin", at=now), fleet.stack.gateway_secret)
    for value in (forged, true, ""):
        for name in (HEADER, HEADER.upper(), HEADER.replace("-", "_")):
            async with fleet.session.get(
                f"{fleet.url}/admin/whoami",
                headers=[("Authorization", f"Bearer {fleet.keys['red-ci']}"), (name, value), (name, forged)],
            ) as answer:
                told = await answer.json()
            assert (told["key"], told["team"], told["role"]) == ("red-ci", "red", "user")
    others = {"x_litellm_user_id": "root", "x_forwarded_user": "root", "x_remote_user": "root", "x_api_key": "pk-x"}
    told = (await fleet.ask("GET", "/admin/whoami", "red-ci", **others, x_original_url="/admin/keys/first")).body
    assert (told["key"], told["role"]) == ("red-ci", "user")


async def test_a_key_that_is_not_trusted_names_no_end_user(fleet: Fleet) -> None:
    headers = {
        "x_litellm_end_user_id": "boss",
        "x_openwebui_user_id": "boss",
        "x_openwebui_user_email": "boss@example.com",
        "x_request_id": "of-a-guest",
    }
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "user": "boss",
        "safety_identifier": "boss",
    }
    body["metadata"] = {"user_id": "boss", "user_api_key": "first", "team": "blue"}
    answer = await fleet.ask("POST", "/v1/chat/completions", "red-ci", body, **headers)
    assert answer.status == 200
    (row,) = await fleet.rows("request_id=of-a-guest")
    assert (row["team"], row["key"], row["user"], row["end_user"]) == ("red", "red-ci", "", "")


async def test_calls_with_one_request_id_count_each(fleet: Fleet) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    for _ in range(3):
        assert (await fleet.ask("POST", "/v1/chat/completions", "red-ci", body, x_request_id="again")).status == 200
    assert len(await fleet.rows("request_id=again", 3)) == 3


ODD_PATHS = (
    "/admin%2Fkeys%2Fblue-ci",
    "/admin/keys%2Fblue-ci",
    "/admin/keys/red-ci%2F..%2Fblue-ci",
    "/admin/keys/red-ci/../blue-ci",
    "/admin/keys/%2e%2e/keys/blue-ci",
    "/admin/keys/blue-ci%00",
    "/admin/keys/blue-ci%3Fx=",
    "/admin/keys/blue-ci%0d%0ax-paddock-caller:%20x",
    "/admin/keys/red-ci;/blue-ci",
    "//admin/keys/blue-ci",
    "/admin//keys/blue-ci",
    "/ADMIN/keys/blue-ci",
    "/v1/../admin/keys/blue-ci",
    "/auth/..%2fadmin/keys/blue-ci",
    "/auth/../admin/keys/blue-ci",
    "/key/..%2Fadmin/keys/blue-ci",
    "/admin/../metrics",
    "/admin/..%2Fmetrics",
    "/admin/%252e%252e/metrics",
    "/admin/keys/\u00e4".encode().decode("latin-1"),
    "/admin/keys/%ff%fe",
)


@pytest.mark.parametrize("path", ODD_PATHS)
async def test_no_way_of_writing_a_path_leads_elsewhere(fleet: Fleet, path: str) -> None:
    for key in ("red-ci", "pk-nobody"):
        for method in ("GET", "DELETE"):
            answer = await fleet.ask(method, path, key)
            assert answer.status in NO_RIGHT, answer
            assert "of blue" not in answer.text
            assert "paddock_budget" not in answer.text
    assert (await fleet.ask("GET", "/admin/keys/blue-ci")).status == 200


async def test_a_key_that_is_taken_away_leaves_none_behind(fleet: Fleet) -> None:
    """A stolen admin's key makes and rotates keys without pause, while it is deleted: gateways hear of that later."""
    stolen = (await fleet.must("POST", "/admin/keys", {"name": "stolen", "role": "admin"}))["key"]
    await asyncio.sleep(KNOWN_S)
    made: list[str] = []
    is_over = False

    async def strike() -> None:
        while not is_over:
            for path in ("/admin/keys", "/admin/keys/stolen/rotate"):
                answer = await fleet.ask("POST", path, stolen, {"role": "admin"} if path.endswith("keys") else None)
                if answer.status in (200, 201):
                    made.append(answer.body["key"])

    strikes = [asyncio.create_task(strike()) for _ in range(4)]
    await asyncio.sleep(0.5)
    await fleet.must("DELETE", "/admin/keys/stolen")
    await asyncio.sleep(KNOWN_S)
    is_over = True
    await asyncio.gather(*strikes)
    assert made
    entries = (await fleet.must("GET", "/admin/audit?limit=500"))["data"]
    deleted = next(one["number"] for one in entries if (one["action"], one["subject"]) == ("delete", "stolen"))
    of_it = [one for one in entries if one["actor"] == "key:stolen"]
    assert of_it
    assert all(one["number"] < deleted for one in of_it), "it changed something after it was deleted"
    assert (await fleet.ask("GET", "/v1/models", stolen)).status == 401


async def test_a_key_of_the_settings_can_not_be_taken_over_by_its_name(fleet: Fleet) -> None:
    made = await fleet.ask("POST", "/admin/keys", "red-lead", {"name": "ops"})
    await fleet.ask("POST", "/admin/keys/ops/block", "red-lead")
    await asyncio.sleep(KNOWN_S)
    assert (await fleet.ask("GET", "/v1/models", STATIC_KEY)).status == 200
    assert (await fleet.ask("GET", "/v1/models", made.body["key"])).status in (401, 403)
    changed = await fleet.ask("PATCH", "/admin/teams/blue", STATIC_KEY, {"metadata": {}})
    assert changed.status == 200, changed


async def test_many_calls_at_once_spend_no_more_than_the_budget(fleet: Fleet) -> None:
    secret = await fleet.team("hasty", budgets=[{"amount": 3.5 * CALL_COST}])
    answers = await asyncio.gather(*(fleet.chat(secret) for _ in range(40)))
    assert sorted({answer.status for answer in answers}) == [200, 429]
    assert sum(answer.status == 200 for answer in answers) <= 3


async def left(fleet: Fleet, secret: str, num_chunks: int, **more: Any) -> int:
    """Ask for a stream, and leave after so many chunks of text. Return the status."""
    body = {"model": SLOW, "messages": [{"role": "user", "content": "hi " * 200}], "max_tokens": 20, "stream": True}
    headers = {"Authorization": f"Bearer {secret}"}
    async with aiohttp.ClientSession() as session:
        answer = await session.post(f"{fleet.url}/v1/chat/completions", json=body | more, headers=headers)
        if answer.status == 200:
            while num_chunks:
                line = await answer.content.readline()
                num_chunks -= b'"content":"t' in line
        answer.close()
        return answer.status


async def test_streams_that_are_left_spend_the_budget(fleet: Fleet) -> None:
    secret = await fleet.team("leaving", budgets=[{"amount": 30 * CALL_COST / 4}])
    statuses = []
    for _ in range(8):
        statuses.append(await left(fleet, secret, 10))
        await asyncio.sleep(0.3)
    assert statuses[0] == 200
    assert statuses[-1] == 429
    assert statuses.count(200) <= 4


async def test_answers_in_the_background_spend_the_budget(fleet: Fleet) -> None:
    """Also those that are cancelled, or deleted, while they run."""
    secret = await fleet.team("quiet", budgets=[{"amount": 30 * CALL_COST / 4}])
    body = {"model": SLOW, "input": "hi", "max_output_tokens": 20, "background": True}
    statuses = []
    for number in range(8):
        answer = await fleet.ask("POST", "/v1/responses", secret, body)
        statuses.append(answer.status)
        if answer.status == 200:
            await asyncio.sleep(1.3)  # it is past its prompt
            path = f"/v1/responses/{answer.body['id']}"
            method, path = ("DELETE", path) if number % 2 else ("POST", f"{path}/cancel")
            assert (await fleet.ask(method, path, secret)).status == 200
            await asyncio.sleep(0.2)
    assert statuses[0] == 200
    assert statuses[-1] == 429, statuses


async def test_calls_whose_worker_fails_spend_what_came(fleet: Fleet) -> None:
    secret = await fleet.team("unlucky", budgets=[{"amount": 8 * CALL_COST}])
    statuses = [await left(fleet, secret, 3, model=FAILING) for _ in range(12)]
    assert statuses[0] == 200
    assert statuses[-1] == 429, statuses
