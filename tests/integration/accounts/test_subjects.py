"""Organisations, teams, users and aliases through the API, and what follows from changing one for the others."""

from __future__ import annotations

import pytest
import redis.asyncio

from accounts.protocol.records import TeamRecord, UserRecord, open_subject
from tests.support.admin_api import SECRET, AdminApi
from workers.protocol import keys


async def published(mirror: redis.asyncio.Redis, field: str) -> object:
    value = await mirror.hget(keys.ACCESS_SUBJECTS, field)
    return None if value is None else open_subject(value, SECRET)


async def test_a_team_of_an_organisation(api: AdminApi, mirror: redis.asyncio.Redis) -> None:
    await api.post("/admin/organisations", {"name": "acme", "limits": {"max_parallel": 9}})
    made = await api.post("/admin/teams", {"name": "red", "organisation": "acme", "aliases": ["small"]})
    assert (made["organisation"], made["aliases"], made["published"]) == ("acme", ["small"], True)
    changed = await api.patch("/admin/teams/red", {"limits": {"budgets": [{"amount": 5, "period": "day"}]}})
    assert changed["limits"]["budgets"] == [{"amount": 5.0, "period": "day"}]
    found = await published(mirror, "team:red")
    assert isinstance(found, TeamRecord)
    assert found.limits.budgets[0].amount == 5
    listed = await api.get("/admin/teams?organisation=acme")
    assert [team["name"] for team in listed["data"]] == ["red"]
    assert "2 teams" not in (await api.refused(409, "DELETE", "/admin/organisations/acme"))["message"]
    await api.delete("/admin/teams/red")
    assert await published(mirror, "team:red") is None
    await api.delete("/admin/organisations/acme")


@pytest.mark.parametrize("path", ["/admin/teams/default", "/admin/organisations/default"])
async def test_what_nothing_else_names_stays(api: AdminApi, path: str) -> None:
    await api.refused(409, "DELETE", path)


async def test_a_team_with_keys_is_deleted_only_with_them(api: AdminApi) -> None:
    await api.post("/admin/teams", {"name": "red"})
    await api.post("/admin/keys", {"name": "ci", "team": "red"})
    assert "1 keys" in (await api.refused(409, "DELETE", "/admin/teams/red"))["message"]
    await api.delete("/admin/teams/red?with_keys=true")
    await api.refused(404, "GET", "/admin/keys/ci")


async def test_users_and_their_memberships(api: AdminApi, mirror: redis.asyncio.Redis) -> None:
    for team in ("red", "blue"):
        await api.post("/admin/teams", {"name": team})
    name = "ann@example.com"
    teams = {"red": "manager", "blue": "user"}
    made = await api.post("/admin/users", {"name": name, "email": name, "teams": teams})
    assert made["teams"] == teams
    assert [user["name"] for user in (await api.get("/admin/users?team=red"))["data"]] == [name]
    await api.post("/admin/keys", {"name": "a1", "team": "red", "user": name, "role": "manager"})
    await api.post("/admin/keys", {"name": "a2", "team": "blue", "user": name})
    changed = await api.patch(f"/admin/users/{name}", {"teams": {"red": "user", "blue": None}})
    assert changed["teams"] == {"red": "user"}
    assert (await api.get("/admin/keys/a1"))["role"] == "user", "its key had more rights than the user"
    await api.refused(404, "GET", "/admin/keys/a2")
    found = await published(mirror, f"user:{name}")
    assert isinstance(found, UserRecord)
    assert found.teams == {"red": "user"}
    await api.delete(f"/admin/users/{name}")
    await api.refused(404, "GET", "/admin/keys/a1")


async def test_a_key_of_a_user_has_no_more_than_the_user(api: AdminApi) -> None:
    await api.post("/admin/teams", {"name": "red"})
    await api.post("/admin/users", {"name": "ann", "teams": {"red": "user"}})
    for body, param in (
        ({"team": "red", "user": "ann", "role": "manager"}, "role"),
        ({"team": "default", "user": "ann"}, "user"),
        ({"team": "red", "user": "bob"}, "user"),
    ):
        assert (await api.refused(400, "POST", "/admin/keys", body))["param"] == param
    for teams, param in (({"none": "user"}, "teams.none"), ({"red": "admin"}, "teams.red")):
        assert (await api.refused(400, "PATCH", "/admin/users/ann", {"teams": teams}))["param"] == param


async def test_a_deleted_team_ends_its_memberships(api: AdminApi) -> None:
    await api.post("/admin/teams", {"name": "red"})
    await api.post("/admin/users", {"name": "ann", "teams": {"red": "user"}})
    await api.delete("/admin/teams/red")
    assert (await api.get("/admin/users/ann"))["teams"] == {}


async def test_an_alias_has_limits_whatever_its_name(api: AdminApi, mirror: redis.asyncio.Redis) -> None:
    name = "org/Model-7B:q4_K_M"
    await api.post("/admin/aliases", {"name": name, "limits": {"requests_per_minute": 5}})
    assert (await api.get(f"/admin/aliases/{name}"))["limits"] == {"requests_per_minute": 5}
    assert await published(mirror, f"alias:{name}") is not None
    await api.delete(f"/admin/aliases/{name}")
    assert await published(mirror, f"alias:{name}") is None


async def test_blocked_teams_organisations_and_users_are_published(api: AdminApi, mirror: redis.asyncio.Redis) -> None:
    await api.post("/admin/users", {"name": "ann"})
    for path, field in (("teams/default", "team:default"), ("users/ann", "user:ann")):
        await api.post(f"/admin/{path}/block")
        record = await published(mirror, field)
        assert getattr(record, "blocked", None) is True
        await api.post(f"/admin/{path}/unblock")
        record = await published(mirror, field)
        assert getattr(record, "blocked", None) is False


async def test_an_error_does_not_repeat_megabytes(api: AdminApi) -> None:
    refused = await api.refused(400, "POST", "/admin/teams", {"name": "!" * 1_000_000})
    assert "!!!" in refused["message"]
    assert len(refused["message"]) <= 4096
