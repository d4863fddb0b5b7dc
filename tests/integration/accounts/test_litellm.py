"""Scripts that were written for LiteLLM: its routes and field names, on the same teams, users and keys."""

from __future__ import annotations

import time
from datetime import datetime

import pytest
import redis.asyncio

from accounts.protocol.records import digest, open_record
from tests.support.admin_api import SECRET, AdminApi, caller_of
from workers.protocol import keys

GENERATED = {
    "key_alias": "ci",
    "models": ["small"],
    "max_budget": 20,
    "soft_budget": 10,
    "budget_duration": "30d",
    "tpm_limit": 1000,
    "rpm_limit": 10,
    "max_parallel_requests": 3,
    "team_id": "red",
    "duration": "2d",
    "metadata": {"owner": "ann"},
}


async def test_a_keys_life(api: AdminApi, mirror: redis.asyncio.Redis) -> None:
    await api.post(
        "/team/new", {"team_alias": "red", "models": ["small", "large"], "max_budget": 5, "budget_duration": "7d"}
    )
    made = await api.post("/key/generate", GENERATED)
    for field, value in GENERATED.items():
        if field != "duration":
            assert made[field] == value, field
    assert 2 * 86_400 - 60 < datetime.fromisoformat(made["expires"]).timestamp() - time.time() <= 2 * 86_400
    value = await mirror.hget(keys.ACCESS_KEYS, "ci")
    assert value is not None
    record = open_record(value, SECRET)
    assert record.sha256 == digest(made["key"])
    assert record.limits.budgets[0].warn_at == (0.5,)
    for key in (made["key"], made["token"], digest(made["key"])):
        info = (await api.get(f"/key/info?key={key}"))["info"]
        assert (info["key_alias"], info["spend"], info["team_id"]) == ("ci", 0.0, "red")
    changed = await api.post("/key/update", {"key": made["key"], "rpm_limit": 20, "max_budget": 40, "models": []})
    assert (changed["rpm_limit"], changed["tpm_limit"], changed["max_budget"], changed["models"]) == (
        20,
        1000,
        40.0,
        [],
    )
    assert changed["soft_budget"] == 10
    assert (await api.post("/key/block", {"key": made["key"]}))["blocked"] is True
    assert (await api.post("/key/unblock", {"key": made["key"]}))["blocked"] is False
    anew = await api.post(f"/key/{made['key']}/regenerate", {"grace_period": "1h"})
    assert anew["key"] != made["key"]
    assert (await api.get("/admin/keys/ci"))["previous_hash"] == digest(made["key"])[:8]
    listed = await api.get("/key/list?team_id=red&return_full_object=true")
    assert [key["token"] for key in listed["keys"]] == ["ci"]
    assert (listed["total_count"], listed["current_page"], listed["total_pages"]) == (1, 1, 1)
    assert await api.post("/key/delete", {"keys": [anew["key"]]}) == {"deleted_keys": [anew["key"]]}
    await api.refused(404, "GET", f"/key/info?key={anew['key']}")


async def test_a_teams_life(api: AdminApi) -> None:
    await api.post("/admin/users", {"name": "ann"})
    body = {"team_id": "red", "members_with_roles": [{"role": "admin", "user_id": "ann"}], "tpm_limit": 5}
    made = await api.post("/team/new", body)
    assert (made["team_id"], made["tpm_limit"], made["models"]) == ("red", 5, [])
    assert (await api.get("/admin/users/ann"))["teams"] == {"red": "manager"}
    await api.post("/key/generate", {"team_id": "red", "key_alias": "ci"})
    changed = await api.post("/team/update", {"team_id": "red", "models": ["small"]})
    assert changed["data"]["models"] == ["small"]
    info = await api.get("/team/info?team_id=red")
    assert (info["team_info"]["models"], [key["key_alias"] for key in info["keys"]]) == (["small"], ["ci"])
    assert {team["team_id"] for team in await api.get("/team/list")} == {"default", "red"}
    await api.post("/team/delete", {"team_ids": ["red"]})
    await api.refused(404, "GET", "/team/info?team_id=red")
    await api.refused(404, "GET", "/admin/keys/ci")


async def test_a_new_user_has_a_key(api: AdminApi) -> None:
    await api.post("/team/new", {"team_id": "red"})
    made = await api.post("/user/new", {"user_email": "ann@example.com", "teams": ["red"], "key_alias": "anns"})
    assert (made["user_id"], made["teams"], made["key_alias"]) == ("ann@example.com", ["red"], "anns")
    assert (await api.get("/admin/keys/anns"))["user"] == "ann@example.com"
    info = await api.get("/user/info?user_id=ann@example.com")
    assert [key["token"] for key in info["keys"]] == ["anns"]
    assert [team["team_id"] for team in info["teams"]] == ["red"]


async def test_a_key_sees_itself(api: AdminApi) -> None:
    await api.post("/key/generate", {"key_alias": "ci"})
    own = caller_of("ci", "default", "user")
    assert (await api.get("/key/info", own))["info"]["token"] == "ci"
    assert (await api.get("/key/list", own))["keys"] == ["ci"]
    await api.refused(403, "POST", "/key/generate", {}, own)
    await api.refused(404, "GET", "/key/info?key=first", caller=caller_of("x", "red", "user"))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_budget": 5}, "budget_duration"),
        ({"max_budget": 5, "budget_duration": "90d"}, "budget_duration"),
        ({"max_budget": -1, "budget_duration": "1d"}, "max_budget"),
        ({"duration": "soon"}, "duration"),
        ({"models": "small"}, "models"),
        ({"guardrails": ["pii"]}, "guardrails"),
        ({"rpm_limits": 1}, "rpm_limits"),
        ({"rpm_limit": 0}, "limits.requests_per_minute"),
        ({"key": "sk-mine"}, "key"),
        ({"team_id": "none"}, "team"),
        ({"key_alias": "session-ci"}, "name"),
        ({"key_alias": "user:ann"}, "name"),
    ],
)
async def test_what_can_not_be_done_is_told(api: AdminApi, body: dict[str, object], param: str) -> None:
    assert (await api.refused(400, "POST", "/key/generate", body))["param"] == param


async def test_fields_that_ask_for_nothing_are_taken(api: AdminApi) -> None:
    await api.post("/key/generate", {"aliases": {}, "config": {}, "permissions": {}, "spend": 0, "models": []})
