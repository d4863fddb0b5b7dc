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


async def test_a_name_that_is_another_keys_hash_stands_for_its_own_key(api: AdminApi) -> None:
    """Whoever held a stolen key made one that was named as its hash, and that was blocked in its place."""
    await api.post("/team/new", {"team_alias": "red"})
    await api.post("/admin/keys", {"name": "boss", "team": "red", "role": "manager"})
    manager = caller_of("boss", "red", "manager")
    stolen = await api.post("/key/generate", {"key_alias": "zz-stolen", "team_id": "red"})
    for named in (digest(stolen["key"]), stolen["key"]):
        await api.post("/key/generate", {"key_alias": named}, manager)
    await api.patch("/admin/keys/zz-stolen", {"limits": {"requests_per_minute": 9}})  # it lies behind the others then
    for named in (digest(stolen["key"]), stolen["key"]):
        assert (await api.get(f"/key/info?key={named}"))["info"]["key_alias"] == "zz-stolen"
    assert (await api.post("/key/block", {"key": digest(stolen["key"])}))["key_alias"] == "zz-stolen"


async def test_whether_a_key_of_another_team_exists_is_not_told(api: AdminApi) -> None:
    for team in ("red", "blue"):
        await api.post("/team/new", {"team_alias": team})
    made = await api.post("/key/generate", {"key_alias": "ci", "team_id": "blue"})
    for role in ("manager", "user"):
        await api.post("/admin/keys", {"name": f"a-{role}", "team": "red", "role": role})
    manager, user = caller_of("a-manager", "red", "manager"), caller_of("a-user", "red", "user")
    unknown = await api.refused(404, "GET", "/key/info?key=nobodys", None, user)
    for given in ("ci", made["key"], digest(made["key"])):
        assert await api.refused(404, "GET", f"/key/info?key={given}", None, user) == unknown
        for path, body in (("block", {"key": given}), ("update", {"key": given}), ("delete", {"keys": [given]})):
            assert await api.refused(404, "POST", f"/key/{path}", body, manager) == unknown


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


async def test_names_that_can_not_be_had_are_found_all_the_same(api: AdminApi) -> None:
    made = await api.post("/team/new", {"team_alias": "Red Team!"})
    assert (made["team_id"], made["team_alias"]) == ("Red-Team-", "Red Team!")
    named = await api.post(
        "/team/new", {"team_id": "t1", "team_alias": "The first", "tags": ["a"], "metadata": {"b": 1}}
    )
    assert (named["team_alias"], named["tags"], named["metadata"]) == ("The first", ["a"], {"b": 1})
    assert (await api.get("/team/info?team_id=Red%20Team!"))["team_id"] == "Red-Team-"
    changed = await api.post("/team/update", {"team_id": "Red Team!", "team_alias": "Reds", "tpm_limit": 5})
    assert (changed["data"]["team_alias"], changed["data"]["tpm_limit"]) == ("Reds", 5)
    await api.post("/user/new", {"user_id": "Ann B", "user_alias": "Ann", "auto_create_key": False, "teams": ["t1"]})
    key = await api.post("/key/generate", {"key_alias": "my key", "team_id": "t1", "user_id": "Ann B"})
    assert (key["token"], key["team_id"], key["user_id"]) == ("my-key", "t1", "Ann-B")
    assert (await api.get("/key/list?key_alias=my%20key&user_id=Ann%20B"))["keys"] == ["my-key"]
    assert [team["team_id"] for team in await api.get("/team/list?user_id=Ann%20B")] == ["t1"]
    assert (await api.post("/team/delete", {"team_ids": ["Red Team!"]}))["deleted_teams"] == ["Red Team!"]


async def test_a_list_has_only_what_was_asked_for(api: AdminApi) -> None:
    await api.post("/admin/organisations", {"name": "other"})
    await api.post("/team/new", {"team_id": "red", "organization_id": "other"})
    await api.post("/key/generate", {"key_alias": "one"})
    await api.post("/key/generate", {"key_alias": "two", "team_id": "red"})
    assert (await api.get("/key/list?organization_id=other"))["keys"] == ["two"]
    assert (await api.get("/key/list?key_alias=two&team_id=default"))["keys"] == []
    assert (await api.get("/key/list?key_alias=none"))["keys"] == []
    assert [team["team_id"] for team in await api.get("/team/list?organization_id=other")] == ["red"]
    for path in ("/key/list?status=deleted", "/team/list?team=red", "/user/list?role=internal_user"):
        assert "unknown field" in (await api.refused(400, "GET", path))["message"]


async def test_a_users_life(api: AdminApi) -> None:
    await api.post("/team/new", {"team_id": "red"})
    body = {"user_id": "ann", "user_email": "ann@example.com", "user_role": "proxy_admin", "user_alias": "Ann"}
    made = await api.post("/user/new", {**body, "teams": ["red"], "models": ["small"], "duration": "1d"})
    assert (made["user_role"], made["user_alias"], made["blocked"]) == ("proxy_admin", "Ann", False)
    assert (await api.get(f"/key/info?key={made['key']}"))["info"]["models"] == ["small"]
    changed = await api.post("/user/update", {"user_id": "ann", "user_role": "internal_user", "blocked": True})
    assert (changed["data"]["user_role"], changed["data"]["blocked"]) == ("internal_user", True)
    assert changed["data"]["user_alias"] == "Ann"
    await api.post("/user/new", {"user_id": "bob"})
    listed = await api.get("/user/list?page=1&page_size=1")
    assert ([user["user_id"] for user in listed["users"]], listed["total"], listed["total_pages"]) == (["ann"], 2, 2)
    await api.refused(404, "POST", "/user/delete", {"user_ids": ["bob", "who"]})
    assert await api.post("/user/delete", {"user_ids": ["ann", "bob"]}) == {"deleted_users": ["ann", "bob"]}
    await api.refused(404, "GET", f"/key/info?key={made['key']}")
    assert (await api.refused(400, "GET", "/user/info"))["param"] == "user_id"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"user_id": "ann", "user_role": "internal_user_viewer"}, "user_role"),
        ({"user_id": "ann", "models": ["small"]}, "teams"),
        ({"user_id": "ann", "teams": ["red"], "auto_create_key": False, "key_alias": "anns"}, "teams"),
        ({"user_id": "ann", "members_with_roles": []}, "members_with_roles"),
    ],
)
async def test_nobody_is_made_of_what_can_not_be_done(api: AdminApi, body: dict[str, object], param: str) -> None:
    await api.post("/team/new", {"team_id": "red"})
    assert (await api.refused(400, "POST", "/user/new", body))["param"] == param
    await api.refused(404, "GET", "/user/info?user_id=ann")


async def test_a_team_is_not_made_for_members_who_are_not_there(api: AdminApi) -> None:
    await api.refused(404, "POST", "/team/new", {"team_id": "red", "members_with_roles": [{"user_id": "who"}]})
    await api.refused(404, "GET", "/team/info?team_id=red")


async def test_a_budget_is_changed_and_others_are_left(api: AdminApi) -> None:
    budgets = [
        {"amount": 10, "period": "month", "time_zone": "Europe/Berlin"},
        {"amount": 2, "period": "day"},
    ]
    await api.post("/admin/teams", {"name": "red", "limits": {"budgets": budgets}})
    await api.post("/team/update", {"team_id": "red", "max_budget": 5})
    first, second = (await api.get("/admin/teams/red"))["limits"]["budgets"]
    assert (first["amount"], first["time_zone"], first.get("warn_at", [0.8])) == (5, "Europe/Berlin", [0.8])
    assert (second["amount"], second["period"]) == (2, "day")
    await api.post("/team/update", {"team_id": "red", "max_budget": None})
    assert [one["amount"] for one in (await api.get("/admin/teams/red"))["limits"]["budgets"]] == [2]


async def test_a_key_keeps_its_name_and_gets_another_secret(api: AdminApi) -> None:
    made = await api.post(
        "/key/generate", {"key_alias": "ci", "tags": ["a"], "metadata": {"b": 1}, "models": ["small"]}
    )
    assert made["key_name"] == (await api.get("/key/info?key=ci"))["info"]["key_name"]
    refused = await api.refused(400, "POST", "/key/update", {"key": "ci", "key_alias": "other"})
    assert refused["param"] == "key_alias"
    changed = await api.post("/key/update", {"key": "ci", "key_alias": "ci", "tags": [], "models": None})
    assert (changed["tags"], changed["metadata"], changed["models"]) == ([], {"b": 1}, ["small"])
    anew = await api.post("/key/regenerate", {"key": made["key"], "rpm_limit": 7})
    assert (anew["token"], anew["rpm_limit"]) == ("ci", 7)
    assert anew["key"] != made["key"]


async def test_no_list_keeps_a_thread_for_minutes(api: AdminApi) -> None:
    """Its names are looked up one by one, also when the caller has left: 40 such requests would take all threads."""
    await api.post("/key/generate", {"key_alias": "ci"})
    for field in ("keys", "key_aliases"):
        error = await api.refused(400, "POST", "/key/delete", {field: ["ci"] * 1001})
        assert error["message"] == f"`{field}` has 1001 texts. Send 1000 at most."
    assert (await api.get("/key/info?key=ci"))["key"] == "ci"


async def test_requests_as_the_client_sends_them(api: AdminApi) -> None:
    """As litellm 1.110.2's `keys` manager and `lite keys list` do: fields without a value are null or empty."""
    made = await api.post("/key/generate", {"models": ["small"], "aliases": {}, "duration": "24h", "key_alias": "ci"})
    query = "page=1&size=50&return_full_object=true&include_team_keys=false"
    assert [key["token"] for key in (await api.get(f"/key/list?{query}"))["keys"]] == ["ci"]
    await api.post("/key/update", {"key": made["key"], "models": ["small", "large"], "spend": 0.0, "aliases": {}})
    assert (await api.post("/key/delete", {"keys": None, "key_aliases": ["ci"]}))["deleted_keys"] == ["ci"]
