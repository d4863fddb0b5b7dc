"""`GET /admin/calls` and `DELETE /admin/calls/{request_id}`: what gateways have under way, and how an admin ends it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from accounts.protocol.records import digest
from tests.support.caller import Caller, Stream, calling
from tests.support.stack import Stack

MODEL = "slow"
BLUE_KEY = "pk-blue-0123456789"
BLUE = {"name": "blue", "team": "blue", "sha256": digest(BLUE_KEY)}
SOON_S = 10.0


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Two gateways in front of one worker with one slot, and the accounts service."""
    with Stack() as running:
        running.fake_worker(MODEL, "--step-ms", "20", "--tokens", "3000", worker_id="w0", slots=1)
        url = running.accounts().url
        for _ in range(2):
            running.gateway(accounts_url=url, api_keys=json.dumps([BLUE]), ping_interval_s=0.2)
        yield running


@pytest.fixture
async def callers(stack: Stack) -> AsyncIterator[tuple[Caller, Caller]]:
    """The admin at either gateway."""
    first, second = (gateway.url for gateway in stack.gateways)
    async with calling(first, stack.key, MODEL) as here, calling(second, stack.key, MODEL) as there:
        yield here, there


async def calls_at(caller: Caller, query: str = "") -> list[dict[str, Any]]:
    async with caller.session.get(f"{caller.url}/admin/calls{query}") as response:
        told = await response.json()
        assert (response.status, told["silent"]) == (200, [])
        rows: list[dict[str, Any]] = told["data"]
        return rows


async def until(found: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(SOON_S):
        while not await found():  # noqa: ASYNC110 - it is known by asking alone
            await asyncio.sleep(0.05)


async def cancel(caller: Caller, path: str) -> tuple[int, dict[str, Any]]:
    async with caller.session.delete(f"{caller.url}/admin/calls/{path}") as response:
        return response.status, await response.json()


@asynccontextmanager
async def running_and_waiting(one: Caller, two: Caller) -> AsyncIterator[tuple[Stream, Stream]]:
    """A call that has the worker's only slot, and one behind it in the queue, whose stream has begun by a ping."""
    async with AsyncExitStack() as held:
        runs = await held.enter_async_context(one.stream())
        await runs.until_text()
        waits = await held.enter_async_context(two.stream())
        await until(lambda: has(one, {"running", "waiting"}))
        yield runs, waits


async def has(caller: Caller, statuses: set[str]) -> bool:
    return {row["status"] for row in await calls_at(caller)} == statuses


async def test_calls_of_all_gateways_are_listed(stack: Stack, callers: tuple[Caller, Caller]) -> None:
    here, there = callers
    async with running_and_waiting(here, there):
        for caller in callers:
            running, waiting = await calls_at(caller)
            assert (running["status"], running["worker"], running["team"]) == ("running", "w0", "default")
            assert (waiting["status"], waiting["worker"], waiting["position"]) == ("waiting", "", 1)
            assert running["gateway"] != waiting["gateway"]
            assert "boat" not in json.dumps([running, waiting])  # of the prompt
        assert [row["status"] for row in await calls_at(there, f"?model={MODEL}&status=waiting")] == ["waiting"]
        assert await calls_at(there, "?model=other") == []
        assert await calls_at(there, "?team=blue") == []
    await until(lambda: has(here, set()))


@pytest.mark.parametrize("asked", ["here", "there"])
async def test_a_running_call_is_cancelled_from_any_gateway(
    stack: Stack, callers: tuple[Caller, Caller], asked: str
) -> None:
    here, there = callers
    async with running_and_waiting(here, there) as (runs, waits):
        [running, waiting] = await calls_at(here)
        status, told = await cancel(here if asked == "here" else there, running["request_id"])
        assert (status, told["audited"], told["silent"]) == (200, True, [])
        assert [row["request_id"] for row in told["cancelled"]] == [running["request_id"]]
        await runs.finish()
        assert runs.error is not None
        assert runs.error["code"] == "cancelled_by_admin"
        await waits.until_text()  # its slot is free
        [left] = await calls_at(here)
        assert (left["request_id"], left["status"]) == (waiting["request_id"], "running")
    await until(lambda: has(here, set()))


async def test_a_waiting_call_is_cancelled_and_told_why(stack: Stack, callers: tuple[Caller, Caller]) -> None:
    here, there = callers
    async with here.stream() as runs:
        await runs.until_text()
        waits = asyncio.create_task(there.whole())
        await until(lambda: has(here, {"running", "waiting"}))
        [waiting] = await calls_at(here, "?status=waiting")
        assert (await cancel(here, waiting["request_id"]))[0] == 200
        status, told = await asyncio.wait_for(waits, SOON_S)
        assert (status, told["error"]["type"], told["error"]["code"]) == (499, "cancelled_error", "cancelled_by_admin")
        assert await has(here, {"running"})
    await until(lambda: has(here, set()))


async def test_who_cancelled_what_is_in_the_audit(stack: Stack, callers: tuple[Caller, Caller]) -> None:
    here, there = callers
    async with there.stream() as runs:
        await runs.until_text()
        [row] = await calls_at(here)
        await cancel(here, row["request_id"])
        await runs.finish()
    async with here.session.get(f"{here.url}/admin/audit?kind=call&subject={row['request_id']}") as response:
        [entry] = (await response.json())["data"]
    assert (entry["action"], entry["actor"], entry["team"]) == ("cancel", "key:first", "default")
    assert (entry["after"]["model"], entry["after"]["gateway"]) == (MODEL, row["gateway"])
    async with here.session.get(f"{here.url}/admin/audit/verify") as response:
        assert (await response.json())["is_whole"]


async def test_one_request_id_of_two_teams(stack: Stack, callers: tuple[Caller, Caller]) -> None:
    """Callers choose request ids: with `team`, only that team's call is cancelled, however the id is written."""
    here, there = callers
    same = "their/own?id=%41"
    path = "their%2Fown%3Fid%3D%2541"
    async with calling(there.url, BLUE_KEY, MODEL) as blue:
        for caller in (here, blue):
            caller.session.headers["x-request-id"] = same
        async with here.stream() as ours:
            await ours.until_text()
            theirs = asyncio.create_task(blue.whole())
            await until(lambda: has(here, {"running", "waiting"}))
            status, told = await cancel(here, f"{path}?team=blue")
            assert (status, [row["team"] for row in told["cancelled"]]) == (200, ["blue"])
            assert (await asyncio.wait_for(theirs, SOON_S))[0] == 499
            assert [row["team"] for row in await calls_at(here)] == ["default"]
    await until(lambda: has(here, set()))


async def test_each_answer_to_a_request_is_cancelled(stack: Stack, callers: tuple[Caller, Caller]) -> None:
    here, there = callers
    whole = asyncio.create_task(there.whole(n=3))
    await until(lambda: has(here, {"running"}))
    [row] = await calls_at(here)
    assert row["num_answers"] == 3
    await cancel(here, row["request_id"])
    assert (await asyncio.wait_for(whole, SOON_S))[0] == 499
    assert await calls_at(here) == []


async def test_what_is_not_under_way_and_who_is_no_admin(stack: Stack, callers: tuple[Caller, Caller]) -> None:
    here, _ = callers
    status, told = await cancel(here, "req-of-yesterday")
    assert (status, told["error"]["type"]) == (404, "not_found_error")
    async with here.session.get(f"{here.url}/admin/calls?status=asleep") as response:
        assert response.status == 400
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {BLUE_KEY}"}) as session:
        async with session.get(f"{here.url}/admin/calls") as response:
            assert response.status == 403
        async with session.delete(f"{here.url}/admin/calls/req-1") as response:
            assert response.status == 403
    cookie = {"cookie": f"paddock={stack.key}", "sec-fetch-site": "cross-site"}
    async with aiohttp.ClientSession(headers=cookie) as session:
        async with session.delete(f"{here.url}/admin/calls/req-1") as response:
            assert response.status == 401  # another origin's page made the browser send it
        session.headers["sec-fetch-site"] = "same-origin"
        async with session.delete(f"{here.url}/admin/calls/req-1") as response:
            assert response.status == 404


async def test_while_redis_is_away_a_gateway_cancels_its_own(stack: Stack, callers: tuple[Caller, Caller]) -> None:
    here, _ = callers
    async with here.stream() as runs:
        await runs.until_text()
        stack.redis.stop()
        try:
            async with here.session.get(f"{here.url}/admin/calls") as response:
                told = await response.json()
            assert told["silent"]
            [row] = told["data"]
            assert (await cancel(here, row["request_id"]))[0] == 200
            await runs.finish()
            assert runs.error is not None
            assert runs.error["code"] == "cancelled_by_admin"
        finally:
            stack.redis.start()
