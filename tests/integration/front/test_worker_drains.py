"""An admin drains one worker: no call is refused or cut off, and its supervisor starts it again."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import pytest

from accounts.protocol.records import digest
from tests.support.caller import Caller, calling
from tests.support.stack import DEMO_MODEL, Process, Stack
from workers.protocol.exits import Exit

SOON_S = 60.0
PAIR, LONE, LAZY = "pair", "lone", "lazy"
TOKENS = 1200
"""Of an answer that is still written when a worker is drained."""
BLUE_KEY = "pk-blue-0123456789"
BLUE = {"name": "blue", "team": "blue", "sha256": digest(BLUE_KEY)}


def supervisor(stack: Stack, host: str, *models: dict[str, Any]) -> Process:
    catalog = stack.folder / f"{host}.json"
    catalog.write_text(json.dumps({"models": models}))
    command = [sys.executable, "-m", "gateway.cli", "supervisor", "--catalog", str(catalog)]
    environment = {"PADDOCK_HOST_NAME": host, "PADDOCK_STATE_DIR": str(stack.folder / host)}
    return stack.spawn(host, command, environment, "supervisor")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Two machines: one that keeps two workers of a model and one of another, and one that loads on demand."""
    with Stack() as running:
        common = {"path": str(DEMO_MODEL), "slots": 2, "ctx": 1536, "kv_tokens": 3072, "llama": {"n_threads": 1}}
        fixed = [{**common, "name": PAIR, "workers": 2}, {**common, "name": LONE, "workers": 1}]
        lazy = {**common, "name": LAZY, "residency": {"min_resident_s": 0}}
        supervisor(running, "fixed", *fixed)
        supervisor(running, "demand", lazy)
        catalog = running.folder / "catalog.json"
        catalog.write_text(json.dumps({"models": [*fixed, lazy]}))
        running.gateway(accounts_url=running.accounts().url, catalog=catalog, api_keys=json.dumps([BLUE]))
        yield running


@pytest.fixture
async def pair(stack: Stack) -> AsyncIterator[Caller]:
    async with calling(stack.gateways[0].url, stack.key, PAIR) as caller:
        yield caller


def log_of(stack: Stack, host: str) -> str:
    return next(process.text() for process in stack.processes if process.name == host)


async def got(caller: Caller, path: str, status: int = 200) -> dict[str, Any]:
    async with caller.session.get(f"{caller.url}{path}") as response:
        assert response.status == status, await response.text()
        found: dict[str, Any] = await response.json()
        return found


async def drain(caller: Caller, worker: str) -> tuple[int, dict[str, Any]]:
    async with caller.session.post(f"{caller.url}/admin/workers/{worker}/drain") as response:
        return response.status, await response.json()


async def workers_of(caller: Caller) -> dict[str, dict[str, Any]]:
    rows = (await got(caller, "/admin/fleet"))["workers"]
    return {worker: row for worker, row in rows.items() if row["model"] == caller.model}


async def until(caller: Caller, holds: Callable[[dict[str, dict[str, Any]]], bool]) -> dict[str, dict[str, Any]]:
    """The model's workers, once this is true of them."""
    async with asyncio.timeout(SOON_S):
        while not holds(found := await workers_of(caller)):  # noqa: ASYNC110 - it is known by asking alone
            await asyncio.sleep(0.1)
    return found


async def is_back(caller: Caller, worker: str, before: dict[str, Any]) -> None:
    """Wait until a worker of the same id serves that started later."""

    def serves_anew(rows: dict[str, dict[str, Any]]) -> bool:
        row = rows.get(worker)
        return row is not None and row["started_at"] > before["started_at"] and not row["is_draining"]

    await until(caller, serves_anew)


async def place_of_its_call(caller: Caller) -> str:
    [row] = [row for row in (await got(caller, "/admin/calls"))["data"] if row["model"] == caller.model]
    return str(row["worker"])


async def test_a_stream_ends_whole_while_others_take_new_calls(stack: Stack, pair: Caller) -> None:
    rows = await until(pair, lambda found: len(found) == 2)
    async with pair.stream(max_tokens=TOKENS, ignore_eos=True) as told:
        await told.until_text()
        worker = await place_of_its_call(pair)
        await until(pair, lambda found: found[worker]["slots_busy"] == 1)

        plan = await got(pair, f"/admin/plan?action=drain&worker={worker}")
        assert (plan["model"], plan["worker"], plan["kept_by"]) == (PAIR, worker, "supervisor")
        assert (plan["num_running"], plan["num_workers"], plan["is_possible"]) == (1, 2, True)
        assert plan["sentences"] == [
            f"{worker} finishes 1 call first, however long that takes: none is cut off.",
            f"New calls go to the other worker of {PAIR} meanwhile: 2 of 2 slots free.",
            "Then its supervisor starts it again, and it loads the model.",
        ]
        assert not (await workers_of(pair))[worker]["is_draining"]  # it was only asked

        status, answer = await drain(pair, worker)
        assert (status, answer["worker"], answer["model"], answer["calls"]) == (200, worker, PAIR, 1), answer
        assert (answer["is_supervised"], answer["audited"]) == (True, True)
        answers = await asyncio.gather(*(pair.whole(f"Number {n}", max_tokens=8) for n in range(6)))
        assert {code for code, _ in answers} == {200}, answers
        await until(pair, lambda found: found[worker]["is_draining"])
        await told.finish()
    assert (told.error, told.done, told.finish_reason) == (None, True, "length")
    assert told.usage is not None
    assert told.usage["completion_tokens"] == TOKENS
    await is_back(pair, worker, rows[worker])

    [entry] = (await got(pair, f"/admin/audit?kind=worker&subject={worker}"))["data"]
    assert (entry["action"], entry["actor"]) == ("drain", "key:first")
    assert entry["after"] == {"model": PAIR, "boot": answer["boot"], "calls": 1}
    log = log_of(stack, "fixed")
    assert "has drained, as an admin asked, and is started again" in log
    assert " died" not in log


@pytest.mark.parametrize("model", [LONE, LAZY])
async def test_calls_wait_for_the_only_worker_and_are_answered(stack: Stack, model: str) -> None:
    """Again and again: it is no crash, after which a model would have to wait."""
    async with calling(stack.gateways[0].url, stack.key, model) as caller:
        assert (await caller.whole(max_tokens=4))[0] == 200
        for _ in range(4):
            [(worker, before)] = (await until(caller, lambda found: len(found) == 1)).items()
            async with caller.stream(max_tokens=300, ignore_eos=True) as told:
                await told.until_text()
                plan = await got(caller, f"/admin/plan?action=drain&worker={worker}")
                assert "new ones wait until this one has started anew" in plan["sentences"][1]
                assert plan["kept_by"] == ("demand" if model == LAZY else "supervisor")
                assert (await drain(caller, worker))[0] == 200
                waits = asyncio.create_task(caller.whole(max_tokens=4))
                await told.finish()
            assert (told.error, told.finish_reason) == (None, "length")
            status, answer = await asyncio.wait_for(waits, SOON_S)
            assert status == 200, answer
            await is_back(caller, worker, before)
        row = (await got(caller, "/admin/fleet"))["models"][model]
        assert (row["status"], row["why"]) == ("loaded", "")
        log = log_of(stack, "demand" if model == LAZY else "fixed")
        assert " died" not in log
        assert "did not load" not in log


async def test_who_and_what_can_not_be_drained(stack: Stack, pair: Caller) -> None:
    status, answer = await drain(pair, "nobody/else")
    assert (status, answer["error"]["code"]) == (404, "worker_not_found")
    assert "'nobody/else'" in answer["error"]["message"]
    assert (await got(pair, "/admin/plan?action=drain&worker=nobody", 404))["error"]["code"] == "worker_not_found"
    assert (await got(pair, "/admin/plan?action=drain", 404))["error"]["param"] == "worker"
    worker = next(iter(await until(pair, lambda found: len(found) == 2)))
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {BLUE_KEY}"}) as session:
        async with session.post(f"{pair.url}/admin/workers/{worker}/drain") as response:
            assert response.status == 403
        async with session.get(f"{pair.url}/admin/plan?action=drain&worker={worker}") as response:
            assert response.status == 403
    async with pair.session.get(f"{pair.url}/admin/workers/{worker}/drain") as response:
        assert response.status == 405
    assert not (await workers_of(pair))[worker]["is_draining"]


async def test_a_worker_that_nobody_keeps_is_drained_all_the_same(stack: Stack) -> None:
    (stack.folder / "pool").mkdir()  # for its log
    process = stack.fake_worker("alone", worker_id="pool/alone:0")
    stack.wait_until_listed(stack.gateways[0], "alone")
    async with calling(stack.gateways[0].url, stack.key, "alone") as caller:
        plan = await got(caller, "/admin/plan?action=drain&worker=pool/alone:0")
        assert (plan["kept_by"], plan["num_running"], plan["is_possible"]) == ("nobody", 0, True)
        assert plan["sentences"][0] == "pool/alone:0 has no calls, and ends at once."
        assert plan["sentences"][2].startswith("No supervisor keeps it")
        status, answer = await drain(caller, "pool/alone:0")
        assert (status, answer["calls"], answer["is_supervised"]) == (200, 0, False)
        assert await asyncio.to_thread(process.popen.wait, SOON_S) == Exit.DRAINED
        await until(caller, lambda found: not found)


async def test_nothing_is_drained_while_a_new_process_could_not_register(stack: Stack, pair: Caller) -> None:
    worker = next(iter(await until(pair, lambda found: len(found) == 2)))
    stack.redis.stop()
    try:
        status, answer = await drain(pair, worker)
        assert (status, answer["error"]["code"]) == (503, "store_unavailable")
    finally:
        stack.redis.start()
