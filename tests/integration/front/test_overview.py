"""`GET /admin/fleet` and `GET /admin/events`: what admins see of gateways, models, workers and slots."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import aiohttp
import pytest

from gateway.api.http.listeners import MOST_PER_KEY
from tests.support.caller import calling, seen
from tests.support.stack import DEMO_MODEL, Stack

MODEL = "small"
TOLD_S = 10.0
LONG: Mapping[str, Any] = {"max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        running.worker(DEMO_MODEL, MODEL, worker_id="w0", slots=2)
        running.gateway()
        running.gateway()
        yield running


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in response.content:
        if line.startswith(b"event: "):
            name = line[7:].strip().decode()
        elif line.startswith(b"data: "):
            yield name, json.loads(line[6:])


async def until_event(stream: AsyncIterator[tuple[str, Any]], name: str, part: str) -> Any:
    """The next event of this name whose data have this text."""
    async with asyncio.timeout(TOLD_S):
        async for found, data in stream:
            if found == name and part in json.dumps(data):
                return data
    raise AssertionError(f"the stream ended without {name} {part}")


async def test_the_overview_tells_of_all_gateways_calls(stack: Stack) -> None:
    first, second = (gateway.url for gateway in stack.gateways)
    async with calling(first, stack.key, MODEL) as caller, calling(second, stack.key, MODEL) as other:
        await seen(caller, 1)
        async with caller.stream(**LONG) as one, other.stream(**LONG) as two:
            await one.until_text()
            await two.until_text()
            async with asyncio.timeout(TOLD_S):
                while True:
                    async with caller.session.get(f"{first}/admin/fleet?slots={MODEL}") as response:
                        found = await response.json()
                    busy = [slot for slot in found["slots"]["w0"] if slot["is_busy"]]
                    if len(busy) == 2 and found["models"][MODEL]["slots_busy"] == 2 and len(found["gateways"]) == 2:
                        break
            assert {slot["team"] for slot in busy} == {"default"}
            assert all(slot["request_id"].startswith("req-") for slot in busy)
            assert "boat" not in json.dumps(found)  # of the prompt


async def test_events_tell_what_changes(stack: Stack) -> None:
    url = stack.gateways[0].url
    async with (
        calling(url, stack.key, MODEL) as caller,
        caller.session.get(f"{url}/admin/events?slots={MODEL}") as response,
    ):
        assert response.content_type == "text/event-stream"
        told = events(response)
        overview = await until_event(told, "overview", MODEL)
        assert overview["workers"]["w0"]["slots"] == 2
        async with caller.stream(**LONG) as stream:
            await stream.until_text()
            changes = await until_event(told, "changes", '"slots_busy": 1')
            assert changes["workers"].keys() == {"w0"}
            slots = await until_event(told, "slots", '"is_busy": true')
            assert slots.keys() == {"w0"}
        process = stack.fake_worker("other", worker_id="w1")
        changes = await until_event(told, "changes", '"w1"')
        assert changes["models"]["other"]["num_workers"] == 1
        process.stop()
        await until_event(told, "changes", '"w1": null')


async def test_only_admins_see_it(stack: Stack) -> None:
    url = stack.gateways[0].url
    async with aiohttp.ClientSession() as session:
        for path in ("/admin/fleet", "/admin/events"):
            async with session.get(url + path) as response:
                assert response.status == 401


async def test_streams_of_a_key_are_bounded(stack: Stack) -> None:
    url = stack.gateways[0].url
    async with calling(url, stack.key, MODEL) as caller:
        held = [await caller.session.get(f"{url}/admin/events") for _ in range(MOST_PER_KEY)]
        assert {response.status for response in held} == {200}
        async with caller.session.get(f"{url}/admin/events") as response:
            assert response.status == 429
        for response in held:
            response.close()
        async with caller.session.get(f"{url}/admin/fleet?slots={','.join(map(str, range(9)))}") as response:
            assert response.status == 400
