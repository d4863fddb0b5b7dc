"""What admins see of machines' memory, and what loading or unloading would do: with a true supervisor."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tests.support.caller import Caller, calling
from tests.support.stack import DEMO_MODEL, Stack

SOON_S = 60.0
MODELS = ("one", "two")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A gateway, and a machine that has one model loaded at a time."""
    with Stack() as running:
        catalog = running.folder / "catalog.json"
        small = {"path": str(DEMO_MODEL), "slots": 2, "ctx": 512, "residency": {"min_resident_s": 0}}
        entries = [{**small, "name": name} for name in MODELS]
        catalog.write_text(json.dumps({"models": entries, "models_max": 1}))
        command = [sys.executable, "-m", "gateway.cli", "supervisor", "--catalog", str(catalog)]
        running.spawn("supervisor", command, {"PADDOCK_HOST_NAME": "host1"}, "supervisor")
        running.gateway(catalog=catalog)
        yield running


@pytest.fixture
async def caller(stack: Stack) -> AsyncIterator[Caller]:
    async with calling(stack.gateways[0].url, stack.key, "one") as asking:
        yield asking


async def got(caller: Caller, path: str, status: int = 200) -> dict[str, Any]:
    async with caller.session.get(f"{caller.url}{path}") as response:
        assert response.status == status, await response.text()
        found: dict[str, Any] = await response.json()
        return found


async def until(caller: Caller, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The overview, once this is true of it."""
    async with asyncio.timeout(SOON_S):
        while not holds(found := await got(caller, "/admin/fleet")):  # noqa: ASYNC110 - it is known by asking alone
            await asyncio.sleep(0.2)
    return found


async def test_what_a_load_would_do_is_told_and_then_done(stack: Stack, caller: Caller) -> None:
    def is_predicted(found: dict[str, Any]) -> bool:
        return all(found["models"][name]["memory"] for name in MODELS)

    found = await until(caller, is_predicted)
    [(machine, row)] = found["machines"].items()
    [device] = [one for one in row["devices"] if one["id"] == "cpu"]
    assert 0 < device["free_bytes"] <= device["total_bytes"]
    assert row["workers"] == []
    memory = found["models"]["one"]["memory"][machine]
    assert memory["predicted"] == sum(memory[part] for part in ("weights", "cells", "compute", "other"))

    plan = await got(caller, "/admin/plan?action=load&model=one")
    assert (plan["kept_by"], plan["is_possible"], plan["num_workers"]) == ("demand", True, 0)
    assert [each["action"] for each in plan["plan"]["actions"]] == ["start"]
    assert any(line.startswith("Start one on ") for line in plan["sentences"]), plan["sentences"]
    assert (await got(caller, "/admin/fleet"))["machines"][machine]["workers"] == []  # it was only asked

    assert await posted(caller, "/models/load", "one") == 200
    found = await until(caller, lambda now: now["models"]["one"]["status"] == "loaded")
    found = await until(caller, lambda now: [each["model"] for each in now["machines"][machine]["workers"]] == ["one"])
    [worker] = found["machines"][machine]["workers"]
    assert worker["worker"] in found["workers"]
    assert worker["bytes"]["cpu"] > 0

    plan = await got(caller, "/admin/plan?action=load&model=two")
    assert {each["action"] for each in plan["plan"]["actions"]} <= {"stop", "start", "wait", "reserve"}
    assert "one" in {each["model"] for each in plan["plan"]["actions"]}, plan["sentences"]  # it leaves

    plan = await got(caller, "/admin/plan?action=unload&model=one")
    assert plan["num_workers"] == 1
    assert [each["model"] for each in plan["plan"]["actions"] if each["action"] in ("stop", "drain")] == ["one"]
    assert await posted(caller, "/models/unload", "one") == 200
    await until(caller, lambda now: not now["machines"][machine]["workers"])


async def posted(caller: Caller, path: str, model: str) -> int:
    async with caller.session.post(f"{caller.url}{path}", json={"model": model}) as response:
        return response.status


async def test_what_is_no_plan(stack: Stack, caller: Caller) -> None:
    assert (await got(caller, "/admin/plan?action=explode&model=one", 400))["error"]["param"] == "action"
    assert (await got(caller, "/admin/plan?action=load&model=other", 404))["error"]["code"] == "model_not_found"
    stack.fake_worker("lone", worker_id="lone-0")
    stack.wait_until_listed(stack.gateways[0], "lone")
    plan = await got(caller, "/admin/plan?action=unload&model=lone")
    assert (plan["kept_by"], plan["is_possible"], plan["plan"]) == ("nobody", False, None)
