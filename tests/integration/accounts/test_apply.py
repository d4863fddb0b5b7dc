"""Access as a file declares it: made, changed and deleted in one transaction, and nothing if it is so already."""

from __future__ import annotations

import logging
from typing import Any

import httpx2
import pytest
import redis.asyncio

from accounts.protocol.caller import HEADER
from accounts.protocol.records import digest, open_record
from tests.support.admin_api import SECRET, AdminApi, sealed
from workers.protocol import keys

FILE = f"""
organisations:
  - name: acme
    limits: {{max_parallel: 100}}
teams:
  - name: red
    organisation: acme
    aliases: [small]
    limits:
      tokens_per_minute: 1000
      budgets: [{{amount: 25, period: week, time_zone: Europe/Berlin}}]
users:
  - name: ann@example.com
    teams: {{red: manager}}
aliases:
  - {{name: small, limits: {{max_parallel: 4}}}}
keys:
  - name: ci
    team: red
    sha256: {digest("pk-ci")}
    expires_at: 2030-01-01
"""


async def apply(api: AdminApi, text: str, query: str = "", status: int = 200) -> Any:
    answer: httpx2.Response = await api.client.post(
        f"/admin/apply{query}", content=text.encode(), headers={HEADER: sealed(api.caller)}
    )
    assert answer.status_code == status, answer.text
    return answer.json()


def told(applied: Any) -> list[tuple[str, str, str]]:
    return [(change["action"], change["kind"], change["name"]) for change in applied["changes"]]


EVERYTHING = [
    ("create", "organisation", "acme"),
    ("create", "team", "red"),
    ("create", "user", "ann@example.com"),
    ("create", "alias", "small"),
    ("create", "key", "ci"),
]


async def test_a_dry_run_tells_and_changes_nothing(api: AdminApi, caplog: pytest.LogCaptureFixture) -> None:
    before = await api.get("/admin/audit/verify")
    caplog.set_level(logging.INFO, "accounts")
    applied = await apply(api, FILE, "?dry_run=true")
    assert "access changed" not in caplog.messages
    assert told(applied) == EVERYTHING
    assert applied["changes"][1]["fields"]["limits.tokens_per_minute"] == [None, 1000]
    assert await api.get("/admin/audit/verify") == before
    await api.refused(404, "GET", "/admin/teams/red")


async def test_a_file_is_applied_once(api: AdminApi, mirror: redis.asyncio.Redis) -> None:
    applied = await apply(api, FILE)
    assert told(applied) == EVERYTHING
    assert applied["published"]
    assert (await apply(api, FILE))["changes"] == []
    value = await mirror.hget(keys.ACCESS_KEYS, "ci")
    assert value is not None
    assert open_record(value, SECRET).sha256 == digest("pk-ci")
    assert (await api.get("/admin/keys/ci"))["expires_at"] == 1893456000
    assert (await api.get("/admin/teams/red"))["applied"] is True


async def test_the_file_says_what_its_records_are(api: AdminApi) -> None:
    await apply(api, FILE)
    await api.patch("/admin/teams/red", {"limits": {"max_parallel": 1}, "metadata": {"by": "hand"}})
    applied = await apply(api, FILE)
    assert applied["changes"][0]["fields"] == {"limits.max_parallel": [1, None], "metadata.by": ["hand", None]}
    assert told(await apply(api, FILE.replace("max_parallel: 4", "max_parallel: 5"))) == [("update", "alias", "small")]


async def test_what_was_blocked_in_an_emergency_stays_blocked(api: AdminApi) -> None:
    await apply(api, FILE)
    await api.post("/admin/keys/ci/block")
    assert (await apply(api, FILE))["changes"] == []
    assert (await api.get("/admin/keys/ci"))["blocked"] is True


async def test_another_hash_replaces_a_key_with_a_grace(api: AdminApi) -> None:
    await apply(api, FILE)
    other = FILE.replace(f"sha256: {digest('pk-ci')}", f"sha256: {digest('pk-new')}\n    grace_s: 60")
    await apply(api, other)
    shown = await api.get("/admin/keys/ci")
    assert (shown["hash"], shown["previous_hash"]) == (digest("pk-new")[:8], digest("pk-ci")[:8])
    assert (await apply(api, other))["changes"] == []


async def test_a_key_without_a_hash_keeps_its_own(api: AdminApi) -> None:
    await apply(api, FILE)
    rotated = await api.post("/admin/keys/ci/rotate")
    without = FILE.replace(f"    sha256: {digest('pk-ci')}\n", "")
    assert (await apply(api, without))["changes"] == []
    assert (await api.get("/admin/keys/ci"))["hash"] == digest(rotated["key"])[:8]


async def test_pruning_deletes_only_what_was_applied(api: AdminApi) -> None:
    await apply(api, FILE)
    await api.post("/admin/keys", {"name": "by-hand"})
    assert (await apply(api, "{}"))["changes"] == []
    gone = told(await apply(api, "{}", "?prune=true"))
    assert sorted(gone) == sorted(("delete", kind, name) for _, kind, name in EVERYTHING)
    assert (await api.get("/admin/keys/by-hand"))["name"] == "by-hand"


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("teams: [{nam: red}]", "teams[0].name"),
        ("teems: []", "teems"),
        ("teams: [{name: red, limits: {tokens: 1}}]", "teams[0].limits.tokens"),
        ("teams: [{name: red, organisation: none}]", "teams[0].organisation"),
        ("teams: [{name: red}, {name: red}]", "teams[1].name"),
        ("keys: [{name: ci}]", "keys[0].sha256"),
        ("keys: [{name: ci, sha256: abc}]", "keys[0].sha256"),
        ("keys: [{name: ci, sha256: 12}]", "keys[0].sha256"),
        (f"keys: [{{name: a, sha256: {digest('x')}}}, {{name: b, sha256: {digest('x')}}}]", "keys[1].sha256"),
        (f"keys: [{{name: session-ci, sha256: {digest('x')}}}]", "keys[0].name"),
        (f"keys: [{{name: 'user:ann', sha256: {digest('x')}}}]", "keys[0].name"),
        ("keys: [{name: ci, expires_at: soon, sha256: abc}]", "keys[0].expires_at"),
        ("a: &a [1]\nb: *a", None),
        ("[1, 2]", None),
        (r'{"teams": [{"name": "red", "metadata": {"a": "\ud83d"}}]}', None),
        ("{", None),
        ("\x00", None),
    ],
)
async def test_a_file_with_a_fault_changes_nothing(api: AdminApi, text: str, param: str | None) -> None:
    before = await api.get("/admin/audit/verify")
    status = 409 if "b, sha" in text else 400
    error = (await apply(api, f"organisations: [{{name: new}}]\n{text}" if param else text, status=status))["error"]
    assert error["param"] == param, error
    assert await api.get("/admin/audit/verify") == before
