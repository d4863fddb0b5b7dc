"""What each role may do, and every step to more rights that is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from accounts.access import changes, keys
from accounts.protocol.caller import Caller
from tests.support.admin_api import AdminApi, caller_of

USER = "ann@example.com"


@pytest.fixture
async def teams(api: AdminApi) -> AdminApi:
    """Two teams: red, with limits and a manager's key, and blue, with a key."""
    limits = {"requests_per_minute": 100, "budgets": [{"amount": 10}]}
    await api.post("/admin/teams", {"name": "red", "aliases": ["small", "large"], "limits": limits})
    await api.post("/admin/teams", {"name": "blue"})
    await api.post("/admin/users", {"name": USER, "teams": {"red": "user", "blue": "user"}})
    for key in (
        {"name": "red-manager", "team": "red", "role": "manager"},
        {"name": "red-service", "team": "red"},
        {"name": "red-admin", "team": "red", "role": "admin"},
        {"name": "red-heavy", "team": "red", "weight": 9},
        {"name": "red-ann", "team": "red", "user": USER},
        {"name": "blue-service", "team": "blue"},
        {"name": "blue-ann", "team": "blue", "user": USER},
    ):
        await api.post("/admin/keys", key)
    return api


MANAGER = caller_of("red-manager", "red", "manager")
SERVICE = caller_of("red-service", "red", "user")
ANN = caller_of("red-ann", "red", "user", USER)


async def names(api: AdminApi, path: str, caller: Caller) -> set[str]:
    return {one["name"] for one in (await api.get(path, caller))["data"]}


async def test_a_manager_manages_the_keys_of_its_team(teams: AdminApi) -> None:
    made = await teams.post("/admin/keys", {"name": "new", "limits": {"requests_per_minute": 50}}, MANAGER)
    assert (made["team"], made["role"]) == ("red", "user")
    await teams.patch("/admin/keys/new", {"limits": {"requests_per_minute": 100}, "aliases": ["small"]}, MANAGER)
    await teams.post("/admin/keys/new/rotate", None, MANAGER)
    await teams.post("/admin/keys/new/block", None, MANAGER)
    await teams.post("/admin/keys/new/unblock", None, MANAGER)
    await teams.delete("/admin/keys/new", MANAGER)
    await teams.post("/admin/keys/red-ann/block", None, MANAGER)
    assert {entry["team"] for entry in (await teams.get("/admin/audit", MANAGER))["data"]} == {"red"}


async def test_a_manager_fills_no_gateway_with_keys(teams: AdminApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every gateway has the records of all keys in memory, and Redis as well."""
    await teams.post("/admin/teams", {"name": "green"})
    await teams.post("/admin/keys", {"name": "green-manager", "team": "green", "role": "manager"})
    manager = caller_of("green-manager", "green", "manager")
    many = [f"{number:04}{'x' * 240}" for number in range(1000)]
    for method, path in (("POST", "/admin/keys"), ("PATCH", "/admin/keys/green-manager")):
        error = await teams.refused(403, method, path, {"aliases": many}, manager)
        assert error["param"] == "aliases"
        assert "more than the 8192 that a manager's may have" in error["message"]
    await teams.post("/admin/keys", {"name": "wide", "team": "green", "aliases": many})
    await teams.patch("/admin/keys/wide", {"limits": {"requests_per_minute": 5}, "aliases": many[1:]}, manager)
    await teams.post("/admin/keys/wide/rotate", None, manager)

    monkeypatch.setattr(keys, "MAX_KEYS_OF_TEAM", 3)
    await teams.post("/admin/keys", {"name": "third"}, manager)
    for path, body in (("/admin/keys", {"name": "fourth"}), ("/key/generate", {"key_alias": "fourth"})):
        error = await teams.refused(403, "POST", path, body, manager)
        assert "The team 'green' has 3 keys, and a manager makes no more than 3" in error["message"]
    await teams.post("/admin/keys", {"name": "fourth", "team": "green"})


async def test_a_team_fills_the_audit_no_faster_than_its_pace(teams: AdminApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change stays there for good, with up to 50 KiB: a manager's key could fill the disk in hours."""
    monkeypatch.setattr(changes, "MAX_CHANGES_OF_TEAM", 9)  # the fixture has made six of its changes
    for number in range(3):
        await teams.patch("/admin/keys/red-service", {"metadata": {"number": number}}, MANAGER)
    for method, path, body in (
        ("PATCH", "/admin/keys/red-service", {"metadata": {"number": 9}}),
        ("POST", "/admin/keys", {"name": "one-more"}),
        ("POST", "/admin/keys/red-service/rotate", None),
        ("POST", "/key/generate", {"key_alias": "one-more"}),
    ):
        answer = await teams.ask(method, path, body, MANAGER)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_changes"), answer.text
        assert int(answer.headers["retry-after"]) > 0
    await teams.post("/admin/keys/red-service/block", None, MANAGER)
    await teams.delete("/admin/keys/red-heavy", MANAGER)
    await teams.patch("/admin/keys/red-service", {"metadata": {"number": 9}})  # an admin
    await teams.patch("/admin/keys/blue-service", {"metadata": {"number": 9}})
    monkeypatch.setattr(changes, "HOUR_S", 0.0)
    await teams.patch("/admin/keys/red-service", {"metadata": {"number": 10}}, MANAGER)


async def test_what_is_refused_leaves_nothing_in_the_audit_and_in_the_log(
    teams: AdminApi, caplog: pytest.LogCaptureFixture
) -> None:
    before = (await teams.get("/admin/audit/verify"))["num_entries"]
    caplog.clear()
    with caplog.at_level(logging.INFO, "accounts"):
        for _ in range(5):
            for caller, status in ((SERVICE, 403), (MANAGER, 403)):
                await teams.refused(status, "POST", "/admin/keys", {"name": "x", "role": "admin"}, caller)
                await teams.refused(status, "POST", "/admin/teams", {"name": "x"}, caller)
            await teams.refused(400, "PATCH", "/admin/keys/red-service", {"weight": "x" * 1000}, MANAGER)
            await teams.refused(409, "POST", "/admin/keys", {"name": "red-service"}, MANAGER)
    assert (await teams.get("/admin/audit/verify"))["num_entries"] == before
    assert not caplog.records, "a gateway's log has a line for each request, and that is all"


async def test_each_sees_what_is_its_own(teams: AdminApi) -> None:
    everything = await names(teams, "/admin/keys", teams.caller)
    assert {"red-manager", "blue-service"} <= everything
    assert {name[:4] for name in await names(teams, "/admin/keys", MANAGER)} == {"red-"}
    assert await names(teams, "/admin/keys", SERVICE) == {"red-service"}
    assert await names(teams, "/admin/keys", ANN) == {"red-ann"}
    assert await names(teams, "/admin/teams", MANAGER) == {"red"}
    assert await names(teams, "/admin/users", MANAGER) == {USER}
    shown = (await teams.get("/admin/users", MANAGER))["data"][0]
    assert shown["teams"] == {"red": "user"}, "a manager sees another team's membership"


REFUSED: list[tuple[str, Caller, str, str, Any, int]] = [
    ("makes an admin's key", MANAGER, "POST", "/admin/keys", {"role": "admin"}, 403),
    ("makes a key for metrics", MANAGER, "POST", "/admin/keys", {"role": "metrics"}, 403),
    ("makes a key of another team", MANAGER, "POST", "/admin/keys", {"team": "blue"}, 403),
    ("makes a key with more weight", MANAGER, "POST", "/admin/keys", {"weight": 2}, 403),
    ("makes a more urgent key", MANAGER, "POST", "/admin/keys", {"min_priority": -5}, 403),
    ("makes a key that names end users", MANAGER, "POST", "/admin/keys", {"names_end_users": True}, 403),
    ("widens the models beyond the team's", MANAGER, "POST", "/admin/keys", {"aliases": ["huge"]}, 403),
    ("goes beyond the team's limit", MANAGER, "POST", "/admin/keys", {"limits": {"requests_per_minute": 101}}, 403),
    ("goes beyond its budget", MANAGER, "POST", "/admin/keys", {"limits": {"budgets": [{"amount": 11}]}}, 403),
    ("makes its own key an admin's", MANAGER, "PATCH", "/admin/keys/red-manager", {"role": "admin"}, 403),
    ("moves a key to another team", MANAGER, "PATCH", "/admin/keys/red-service", {"team": "blue"}, 403),
    ("widens a key", MANAGER, "PATCH", "/admin/keys/red-service", {"aliases": ["small", "huge"]}, 403),
    ("makes a key of a person", MANAGER, "POST", "/admin/keys", {"user": USER}, 403),
    ("makes a key a person's", MANAGER, "PATCH", "/admin/keys/red-service", {"user": USER}, 403),
    ("makes a key of a person by LiteLLM's route", MANAGER, "POST", "/key/generate", {"user_id": USER}, 403),
    ("makes a key that counts as tokens do", MANAGER, "POST", "/admin/keys", {"name": f"user:{USER}"}, 400),
    ("opens an admin's key", MANAGER, "POST", "/admin/keys/red-admin/rotate", None, 403),
    ("blocks an admin's key", MANAGER, "POST", "/admin/keys/red-admin/block", None, 403),
    ("deletes an admin's key", MANAGER, "DELETE", "/admin/keys/red-admin", None, 403),
    ("opens a key with more rights", MANAGER, "POST", "/admin/keys/red-heavy/rotate", None, 403),
    ("opens a person's key", MANAGER, "POST", "/admin/keys/red-ann/rotate", None, 403),
    ("reads another team's key", MANAGER, "GET", "/admin/keys/blue-service", None, 404),
    ("changes another team's key", MANAGER, "PATCH", "/admin/keys/blue-service", {"weight": 1}, 404),
    ("deletes another team's key", MANAGER, "DELETE", "/admin/keys/blue-service", None, 404),
    ("opens another team's key", MANAGER, "POST", "/admin/keys/blue-service/rotate", None, 404),
    ("reads another team", MANAGER, "GET", "/admin/teams/blue", None, 404),
    ("widens its own team", MANAGER, "PATCH", "/admin/teams/red", {"limits": None}, 403),
    ("makes a team", MANAGER, "POST", "/admin/teams", {"name": "green"}, 403),
    ("adds itself to a team", MANAGER, "PATCH", f"/admin/users/{USER}", {"teams": {"blue": "manager"}}, 403),
    ("makes a user", MANAGER, "POST", "/admin/users", {"name": "eve", "admin": True}, 403),
    ("reads organisations", MANAGER, "GET", "/admin/organisations", None, 403),
    ("lists aliases", MANAGER, "GET", "/admin/aliases", None, 403),
    ("applies a file", MANAGER, "POST", "/admin/apply", {"keys": []}, 403),
    ("checks the audit", MANAGER, "GET", "/admin/audit/verify", None, 403),
    ("makes a key", SERVICE, "POST", "/admin/keys", {}, 403),
    ("changes its own key", SERVICE, "PATCH", "/admin/keys/red-service", {"weight": 2}, 403),
    ("rotates its own key", SERVICE, "POST", "/admin/keys/red-service/rotate", None, 403),
    ("reads a key of its team", SERVICE, "GET", "/admin/keys/red-manager", None, 404),
    ("reads its person's key in another team", ANN, "GET", "/admin/keys/blue-ann", None, 404),
    ("reads the audit", SERVICE, "GET", "/admin/audit", None, 403),
    ("reads who else there is", caller_of("m", "red", "metrics"), "GET", "/admin/keys", None, 403),
    ("has no key", Caller(), "GET", "/admin/keys", None, 401),
]


@pytest.mark.parametrize(
    ("who", "method", "path", "body", "status"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
async def test_a_step_to_more_rights_is_refused(
    teams: AdminApi, who: Caller, method: str, path: str, body: object, status: int
) -> None:
    error = await teams.refused(status, method, path, body, who)
    assert error["message"]


async def test_a_key_with_bounds_makes_none_without(teams: AdminApi) -> None:
    own = {"aliases": ["small"], "networks": ["10.0.0.0/8"], "max_tokens": 100, "duration_s": 1000}
    await teams.post("/admin/keys", {"name": "bound", "team": "red", "role": "manager", **own})
    bound = caller_of("bound", "red", "manager")
    within = {"aliases": ["small"], "networks": ["10.1.0.0/16"], "max_tokens": 50, "duration_s": 500}
    await teams.post("/admin/keys", within, bound)
    wider: tuple[dict[str, object], ...] = (
        {"aliases": None},
        {"aliases": ["small", "large"]},
        {"networks": []},
        {"networks": ["10.1.0.0/16", "192.168.0.0/16"]},
        {"networks": ["::/0"]},
        {"max_tokens": None},
        {"max_tokens": 101},
        {"duration_s": 2000},
    )
    for more in wider:
        await teams.refused(403, "POST", "/admin/keys", {**within, **more}, bound)
    forever = {name: value for name, value in within.items() if name != "duration_s"}
    await teams.refused(403, "POST", "/admin/keys", forever, bound)


async def test_a_managers_key_that_is_not_in_the_database_makes_none(teams: AdminApi) -> None:
    stranger = caller_of("of-the-settings", "red", "manager")
    assert "api_keys" in (await teams.refused(403, "POST", "/admin/keys", {}, stranger))["message"]


async def test_a_manager_does_not_learn_of_keys_of_others_by_making_one_of_their_name(teams: AdminApi) -> None:
    """Names are one's own across all teams, so that this is told; no more than the name is."""
    error = await teams.refused(409, "POST", "/admin/keys", {"name": "blue-service"}, MANAGER)
    assert "blue'" not in error["message"]


TAKEN: list[tuple[str, str, str, Any]] = [
    ("deleted", "DELETE", "/admin/keys/{key}", None),
    ("blocked", "POST", "/admin/keys/{key}/block", None),
    ("lowered", "PATCH", "/admin/keys/{key}", {"role": "user"}),
    ("moved", "PATCH", "/admin/keys/{key}", {"team": "blue"}),
]


@pytest.mark.parametrize(("method", "path", "body"), [row[1:] for row in TAKEN], ids=[row[0] for row in TAKEN])
async def test_a_key_that_was_taken_away_makes_none_while_gateways_are_behind(
    teams: AdminApi, method: str, path: str, body: object
) -> None:
    """Gateways learn of it within a second; a key that was made meanwhile would stay."""
    await teams.ask(method, path.format(key="red-manager"), body)
    await teams.refused(403, "POST", "/admin/keys", {"name": "kept"}, MANAGER)
    await teams.refused(403, "POST", "/admin/keys/red-service/rotate", None, MANAGER)
    if method != "PATCH" or "role" in str(body):
        admin = caller_of("red-admin", "red", "admin")
        await teams.post("/admin/keys", {"name": "of-an-admin"}, admin)
        await teams.ask(method, path.format(key="red-admin"), body)
        await teams.refused(403, "POST", "/admin/keys", {"name": "kept"}, admin)
        await teams.refused(403, "POST", "/admin/apply", {"teams": [{"name": "green"}]}, admin)


async def test_a_blocked_person_changes_nothing_with_a_key_or_a_token(teams: AdminApi) -> None:
    await teams.post("/admin/users", {"name": "boss", "admin": True})
    await teams.post("/admin/keys", {"name": "of-boss", "user": "boss", "role": "admin"})
    callers = caller_of("of-boss", "default", "admin", "boss"), caller_of("", "default", "admin", "boss")
    for number, caller in enumerate(callers):
        await teams.post("/admin/teams", {"name": f"green-{number}"}, caller)
    await teams.post("/admin/users/boss/block")
    for caller in callers:
        assert (
            "boss is blocked" in (await teams.refused(403, "POST", "/admin/teams", {"name": "grey"}, caller))["message"]
        )


async def test_a_key_of_the_settings_is_none_of_the_database(teams: AdminApi) -> None:
    """Whoever makes a key of its name takes nothing from it, and gives it nothing."""
    await teams.post("/admin/keys", {"name": "ops"}, MANAGER)
    await teams.post("/admin/keys/ops/block", None, MANAGER)
    ops = Caller(key="ops", of_settings=True, team="red", role="admin")
    await teams.post("/admin/teams", {"name": "green"}, ops)
    lead = Caller(key="red-manager", of_settings=True, team="red", role="manager")
    assert "api_keys" in (await teams.refused(403, "POST", "/admin/keys", {}, lead))["message"]


async def test_no_one_blocks_the_key_of_the_request(teams: AdminApi) -> None:
    await teams.refused(409, "POST", "/admin/keys/red-manager/block", None, MANAGER)


@pytest.mark.parametrize("header", ["", "forged", "0" * 64 + ".e30=", "00.!!"])
async def test_a_caller_that_no_gateway_sealed_is_refused(api: AdminApi, header: str) -> None:
    answer = await api.client.get("/admin/keys", headers={"x-paddock-caller": header})
    assert answer.status_code == 401
