"""The audit: every change with who, when, from where, before and after, in a chain that shows what was altered."""

from __future__ import annotations

import logging

import pytest
from sqlalchemy import delete, update

from accounts.database.schema import audit
from accounts.protocol.records import digest
from tests.support.admin_api import AdminApi


async def test_every_change_is_told(api: AdminApi, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "accounts")
    made = await api.post("/admin/keys", {"name": "ci", "weight": 1})
    await api.patch("/admin/keys/ci", {"weight": 2})
    await api.patch("/admin/keys/ci", {"weight": 2})
    rotated = await api.post("/admin/keys/ci/rotate")
    await api.post("/admin/keys/ci/block")
    await api.delete("/admin/keys/ci")
    found = (await api.get("/admin/audit?kind=key&subject=ci"))["data"]
    assert [entry["action"] for entry in found] == ["delete", "block", "rotate", "update", "create"]
    changed = found[3]
    assert (changed["actor"], changed["address"], changed["request_id"]) == ("key:first", "192.0.2.7", "req-test")
    assert (changed["before"]["weight"], changed["after"]["weight"]) == (1.0, 2.0)
    assert found[0]["after"] is None
    assert found[4]["before"] is None
    told = str(found) + str(caplog.records) + "".join(str(getattr(line, "fields", "")) for line in caplog.records)
    for secret in (made["key"], rotated["key"]):
        assert secret not in told
        assert digest(secret) not in told
        assert digest(secret)[:8] in told


async def test_the_chain_shows_what_was_altered(api: AdminApi) -> None:
    for name in ("a", "b", "c"):
        await api.post("/admin/keys", {"name": name})
    whole = await api.get("/admin/audit/verify")
    assert whole["is_whole"]
    last = (await api.get("/admin/audit?limit=1"))["data"][0]
    assert (whole["num_entries"], whole["last_hash"]) == (last["number"], last["hash"])
    number = last["number"] - 1
    database = api.accounts.database
    with database.transaction() as connection:
        connection.execute(update(audit).where(audit.c.number == number).values(actor="key:nobody"))
    found = await api.get("/admin/audit/verify")
    assert (found["is_whole"], found["fault"]) == (False, f"entry {number} was altered")
    with database.transaction() as connection:
        connection.execute(delete(audit).where(audit.c.number == number))
    assert (await api.get("/admin/audit/verify"))["fault"] == f"entry {number} is missing"


async def test_the_audit_comes_in_pages(api: AdminApi) -> None:
    for number in range(5):
        await api.post("/admin/keys", {"name": f"k{number}"})
    first = await api.get("/admin/audit?kind=key&limit=3")
    second = await api.get(f"/admin/audit?kind=key&limit=3&cursor={first['next']}")
    subjects = [entry["subject"] for entry in [*first["data"], *second["data"]]]
    assert subjects[:5] == ["k4", "k3", "k2", "k1", "k0"]
