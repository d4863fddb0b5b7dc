"""Keys through the API: made, shown, changed, rotated, blocked and deleted, in the database and in Redis at once."""

from __future__ import annotations

import time

import pytest
import redis.asyncio

from accounts.protocol.key_format import is_whole
from accounts.protocol.records import AccessRecord, digest, open_record
from tests.support.admin_api import SECRET, AdminApi
from workers.protocol import keys


async def published(mirror: redis.asyncio.Redis, name: str) -> AccessRecord | None:
    value = await mirror.hget(keys.ACCESS_KEYS, name)
    return None if value is None else open_record(value, SECRET)


async def test_a_key_is_made_and_shown_once(api: AdminApi, mirror: redis.asyncio.Redis) -> None:
    made = await api.post("/admin/keys", {"name": "ci", "limits": {"requests_per_minute": 60}, "metadata": {"a": 1}})
    assert is_whole(made["key"])
    assert len(made["key"]) == 52
    assert made["published"] is True
    shown = await api.get("/admin/keys/ci")
    assert made["key"] not in str(shown)
    assert digest(made["key"]) not in str(shown)
    assert shown["hash"] == digest(made["key"])[:8]
    assert (shown["team"], shown["role"], shown["created_by"]) == ("default", "user", "key:first")
    assert shown["limits"] == {"requests_per_minute": 60}
    assert shown["metadata"] == {"a": 1}
    record = await published(mirror, "ci")
    assert record is not None
    assert record.sha256 == digest(made["key"])
    assert record.limits.requests_per_minute == 60


async def test_a_key_without_a_name_gets_one(api: AdminApi) -> None:
    made = await api.post("/admin/keys", {})
    assert made["name"].startswith("key-")


async def test_changes_are_merged_and_published(api: AdminApi, mirror: redis.asyncio.Redis) -> None:
    await api.post("/admin/keys", {"name": "ci", "limits": {"requests_per_minute": 60, "tokens_per_day": 9}})
    changed = await api.patch("/admin/keys/ci", {"limits": {"tokens_per_day": None, "max_parallel": 2}, "weight": 2})
    assert changed["limits"] == {"requests_per_minute": 60, "max_parallel": 2}
    record = await published(mirror, "ci")
    assert record is not None
    assert (record.weight, record.limits.max_parallel, record.limits.tokens_per_day) == (2, 2, None)


async def test_a_blocked_key_is_published_as_blocked_and_a_deleted_one_is_gone(
    api: AdminApi, mirror: redis.asyncio.Redis
) -> None:
    await api.post("/admin/keys", {"name": "ci"})
    assert (await api.post("/admin/keys/ci/block"))["blocked"] is True
    record = await published(mirror, "ci")
    assert record is not None
    assert record.blocked
    assert (await api.post("/admin/keys/ci/unblock"))["blocked"] is False
    assert await api.delete("/admin/keys/ci") == {"name": "ci", "deleted": True, "published": True}
    assert await published(mirror, "ci") is None
    await api.refused(404, "GET", "/admin/keys/ci")


async def test_a_rotated_key_leaves_the_one_before_a_grace(api: AdminApi, mirror: redis.asyncio.Redis) -> None:
    made = await api.post("/admin/keys", {"name": "ci"})
    rotated = await api.post("/admin/keys/ci/rotate", {"grace_s": 60})
    assert rotated["key"] != made["key"]
    assert 50 < rotated["previous_until"] - time.time() <= 60
    record = await published(mirror, "ci")
    assert record is not None
    assert record.sha256 == digest(rotated["key"])
    assert record.previous_sha256 == digest(made["key"])


async def test_a_rotation_whose_reply_was_lost_can_be_repeated(api: AdminApi) -> None:
    made = await api.post("/admin/keys", {"name": "ci"})
    first = await api.post("/admin/keys/ci/rotate", idempotency_key="one")
    again = await api.post("/admin/keys/ci/rotate", idempotency_key="one")
    assert again["key"] == first["key"] != made["key"]
    assert again["version"] == first["version"]
    assert again["previous_hash"] == made["hash"]
    other = await api.post("/admin/keys/ci/rotate", idempotency_key="two")
    assert other["key"] != first["key"]
    back = await api.post("/admin/keys/ci/rotate", idempotency_key="one")
    assert back["key"] not in (first["key"], made["key"], other["key"]), "a key that was replaced came back"


async def test_making_a_key_whose_reply_was_lost_can_be_repeated(api: AdminApi) -> None:
    body = {"name": "ci", "team": "default"}
    first = await api.post("/admin/keys", body, idempotency_key="one")
    assert (await api.post("/admin/keys", body, idempotency_key="one"))["key"] == first["key"]
    assert (await api.ask("POST", "/admin/keys", body, headers={"idempotency-key": "two"})).status_code == 409
    await api.refused(409, "POST", "/admin/keys", body)
    await api.delete("/admin/keys/ci")
    anew = await api.post("/admin/keys", body, idempotency_key="one")
    assert anew["key"] != first["key"], "a key that was deleted came back"


async def test_lists_come_in_pages(api: AdminApi) -> None:
    for number in range(7):
        await api.post("/admin/keys", {"name": f"k{number}", "user": ""})
    found, cursor = [], ""
    while True:
        page = await api.get(f"/admin/keys?limit=3&cursor={cursor}")
        found += [key["name"] for key in page["data"]]
        if (cursor := page["next"]) is None:
            break
    assert found == [f"k{number}" for number in range(7)]


async def test_two_admins_at_once_lose_no_change(api: AdminApi) -> None:
    made = await api.post("/admin/keys", {"name": "ci"})
    first = await api.patch("/admin/keys/ci", {"weight": 2, "version": made["version"]})
    error = await api.refused(409, "PATCH", "/admin/keys/ci", {"weight": 3, "version": made["version"]})
    assert str(first["version"]) in error["message"]
    assert (await api.get("/admin/keys/ci"))["weight"] == 2
    await api.refused(409, "DELETE", f"/admin/keys/ci?version={made['version']}")
    await api.delete(f"/admin/keys/ci?version={first['version']}")


async def test_bodies_are_strict(api: AdminApi) -> None:
    await api.post("/admin/keys", {"name": "ci"})
    for body, param in (
        ({"wieght": 2}, "wieght"),
        ({"weight": "2"}, "weight"),
        ({"limits": {"requests_per_minut": 2}}, "limits.requests_per_minut"),
        ({"limits": {"requests_per_minute": 0}}, "limits.requests_per_minute"),
        ({"limits": {"budgets": [{"amount": 1, "time_zone": "Mars"}]}}, "limits.budgets[0].time_zone"),
        ({"networks": ["10.0.0.0/40"]}, "networks"),
        ({"sha256": "0" * 64}, "sha256"),
        ({"previous_until": 2e9}, "previous_until"),
        ({"team": "none"}, "team"),
        ({"user": "none"}, "user"),
        ({"name": "other"}, "name"),
        ({"duration_s": -1}, "duration_s"),
        ({"role": "king"}, "role"),
        ({"metadata": {"a": "x" * 20_000}}, "metadata"),
    ):
        error = await api.refused(400, "PATCH", "/admin/keys/ci", body)
        assert error["param"] == param, error
    for body, param in (({"name": "a/b"}, "name"), ({"name": "a b"}, "name"), ({"expires_at": 5}, "expires_at")):
        assert (await api.refused(400, "POST", "/admin/keys", body))["param"] == param
    assert (await api.client.post("/admin/keys")).status_code == 401


async def test_the_first_key_is_left_to_gateways(api: AdminApi) -> None:
    for method, path in (("POST", "/admin/keys/first/rotate"), ("DELETE", "/admin/keys/first")):
        assert "PADDOCK_API_KEY" in (await api.refused(403, method, path))["message"]
    await api.refused(403, "POST", "/admin/keys", {"name": "first"})


@pytest.mark.parametrize("name", ["session-ci", "user:ann@example.com"])
async def test_names_of_signed_in_people_are_reserved(api: AdminApi, name: str) -> None:
    error = await api.refused(400, "POST", "/admin/keys", {"name": name})
    assert (error["param"], name in error["message"], "choose another" in error["message"]) == ("name", True, True)
    await api.post("/admin/teams", {"name": name})  # which is no key


async def test_unknown_routes_answer_in_the_form_of_errors(api: AdminApi) -> None:
    assert (await api.refused(404, "GET", "/admin/nothing"))["type"] == "not_found_error"
    assert (await api.refused(404, "PUT", "/admin/keys/ci"))["message"].startswith("There is no route PUT")
