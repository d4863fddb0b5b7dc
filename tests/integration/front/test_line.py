"""What callers are told while they wait for a slot, and of where their call went."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from accounts.protocol.records import digest
from tests.integration.front.conftest import NARROW_KEY
from tests.support.caller import Caller, calling
from tests.support.stack import Process, Stack

WAITING = re.compile(rb": waiting position=(\d+) wait_s=(\d+\.\d)\n")
SLOTS = 2


@asynccontextmanager
async def taken(caller: Caller) -> AsyncIterator[AsyncExitStack]:
    """All slots of the slow pool, until the block ends or the stack is closed."""
    async with AsyncExitStack() as streams:
        for _ in range(SLOTS):
            stream = await streams.enter_async_context(caller.stream())
            assert stream.status == 200, await stream.response.text()
            await stream.until_text()
        yield streams


@pytest.fixture
def slow(caller: Caller) -> Caller:
    caller.model = "slow"
    return caller


async def test_a_stream_that_waits_tells_where_it_stands(slow: Caller) -> None:
    async with taken(slow), slow.stream() as first:
        # Its headers went out with a ping: it has no worker yet.
        assert first.headers["x-queue-position"] == "1"
        assert "x-paddock-worker" not in first.headers
        async with slow.stream() as second:
            assert second.headers["x-queue-position"] == "2"
            lines = [await second.response.content.readline() for _ in range(2)]
            told = WAITING.fullmatch(lines[0])
            assert told is not None, lines
            assert told[1] == b"2"
            assert float(told[2]) > 0
            await second.finish()
        assert second.error is not None
        assert second.error["code"] == "queue_timeout"


async def test_several_answers_wait_as_the_first_of_them_does(slow: Caller) -> None:
    async with taken(slow), slow.stream(n=2) as both:
        told = [WAITING.fullmatch(line) async for line in both.response.content if line.startswith(b":")]
    assert len(told) >= 2
    assert {found and found[1] for found in told} == {b"1"}
    assert both.headers["x-queue-position"] == "1"


async def test_a_whole_answer_tells_where_it_stood(slow: Caller) -> None:
    async with taken(slow) as streams:
        waiting = asyncio.create_task(ask(slow))
        await asyncio.sleep(0.3)
        await streams.aclose()
        status, headers = await waiting
    assert status == 200
    assert headers["x-queue-position"] == "1"
    assert float(headers["x-paddock-queue-ms"]) > 100
    status, headers = await ask(slow)
    assert (status, headers["x-queue-position"]) == (200, "0")


async def test_retry_after_is_the_predicted_wait(slow: Caller) -> None:
    async with taken(slow):
        status, headers = await ask(slow)
    assert status == 503
    assert 1 <= int(headers["retry-after"]) <= 60


async def test_a_team_may_fill_its_part_of_the_line_only(stack: Stack) -> None:
    other = {"name": "other", "team": "green", "sha256": digest("pk-green")}
    gateway = stack.gateway(max_queue_per_team=1, queue_timeout_s=1.0, api_keys=json.dumps([other]))
    async with (
        calling(gateway.url, stack.key, "slow") as red,
        calling(gateway.url, "pk-green", "slow") as green,
        taken(red),
    ):
        waiting = asyncio.create_task(ask(red))
        await asyncio.sleep(0.3)
        status, body = await red.whole()
        assert (status, body["error"]["code"]) == (429, "queue_full")
        assert "1 calls of team 'default' wait" in body["error"]["message"]
        assert "at most 1 of one team may (max_queue_per_team)" in body["error"]["message"]
        assert (await green.whole())[0] == 503, "it may wait, as long as calls may"
        assert (await waiting)[0] == 503
    gateway.stop()


async def test_who_asks_is_told_why(caller: Caller, gateway: Process) -> None:
    _, headers = await ask(caller)
    assert "x-paddock-placement" not in headers
    async with calling(gateway.url, NARROW_KEY, "quick") as anybody:
        _, headers = await ask(anybody, {"x-paddock-debug": "1"})
    assert re.fullmatch(r"quick-a wait_ms=\d+ cost_ms=\d+ burden_ms=\d+ cached=\d+", headers["x-paddock-placement"])


async def ask(caller: Caller, headers: dict[str, str] | None = None) -> tuple[int, Mapping[str, str]]:
    body = caller.body(max_tokens=2)
    async with caller.session.post(f"{caller.url}/v1/chat/completions", json=body, headers=headers) as response:
        await response.read()
        return response.status, response.headers


async def infill(caller: Caller, session: str, **more: object) -> tuple[int, Mapping[str, str], dict[str, Any]]:
    body = {"model": caller.model, "input_prefix": "def f(", "input_suffix": "", "n_predict": 100, **more}
    headers = {"x-session-id": session} if session else None
    async with caller.session.post(f"{caller.url}/infill", json=body, headers=headers) as response:
        return response.status, response.headers, await response.json()


async def test_an_autocomplete_ends_the_one_before_it_of_its_session(slow: Caller) -> None:
    older = asyncio.create_task(infill(slow, "window-1"))
    other = asyncio.create_task(infill(slow, "window-2", n_predict=30))
    await asyncio.sleep(0.2)
    assert (await infill(slow, "window-1", n_predict=2))[0] == 200, "its slot is free again: there are two"
    status, headers, body = await older
    assert (status, headers["x-should-retry"]) == (409, "false")
    assert body["error"]["message"].startswith("A newer request of this session")
    assert (await other)[0] == 200


async def test_a_stream_of_an_older_autocomplete_says_why_it_ends(slow: Caller) -> None:
    body = {"model": "slow", "input_prefix": "def f(", "input_suffix": "", "stream": True}
    headers = {"x-session-id": "window-3"}
    async with slow.session.post(f"{slow.url}/infill", json=body, headers=headers) as older:
        await older.content.readline()
        assert (await infill(slow, "window-3", n_predict=2))[0] == 200
        rest = (await older.read()).decode()
    assert "took this one's place" in rest.strip().splitlines()[-1]


async def test_autocompletes_without_a_session_go_on_beside_each_other(slow: Caller) -> None:
    older = asyncio.create_task(infill(slow, "", n_predict=20))
    await asyncio.sleep(0.1)
    assert (await infill(slow, "", n_predict=2))[0] == 200
    assert (await older)[0] == 200
