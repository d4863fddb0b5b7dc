"""WebSockets are bounded: how many of a key and in all, and what they remember, which is given back."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator

import aiohttp
import psutil
import pytest
from websockets.exceptions import InvalidStatus

from accounts.protocol.records import digest
from tests.support.socket_caller import connected
from tests.support.stack import Process, Stack
from tests.support.waiting import until

MODEL = "huge"
OTHER_KEY = "pk-other-0123456789"
TEXT_BYTES = 3_000_000
NUM_SOCKETS = 30
SPARE_BYTES = 48 << 20
"""What a gateway may have grown by when it has answered its first requests."""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        running.fake_worker(MODEL, "--step-ms", "1", "--tokens", "4", "--ctx", "4000000")
        yield running


@pytest.fixture(scope="module")
def gateway(stack: Stack) -> Process:
    records = [{"name": "other", "team": "blue", "sha256": digest(OTHER_KEY)}]
    return stack.gateway(
        api_keys=json.dumps(records), max_sockets_per_key=20, max_sockets=22, socket_bytes_per_team=2 * TEXT_BYTES
    )


async def refused(gateway: Process, key: str) -> tuple[int, str]:
    """Status and code of a handshake that is refused."""
    with pytest.raises(InvalidStatus) as caught:
        async with connected(gateway.url, key, MODEL):
            pass
    answer = caught.value.response
    return answer.status_code, json.loads(answer.body)["error"]["code"]


async def responded(gateway: Process, key: str) -> tuple[int, str]:
    """Status, and code of the error, of a request without a WebSocket."""
    headers, body = {"Authorization": f"Bearer {key}"}, {"model": MODEL, "input": "hi"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{gateway.url}/v1/responses", json=body, headers=headers) as answer,
    ):
        return answer.status, "" if answer.status == 200 else (await answer.json())["error"]["code"]


async def test_one_key_does_not_open_all(stack: Stack, gateway: Process) -> None:
    async with contextlib.AsyncExitStack() as held:
        for _ in range(20):
            await held.enter_async_context(connected(gateway.url, stack.key, MODEL))
        assert await refused(gateway, stack.key) == (429, "too_many_sockets")
        for _ in range(2):
            await held.enter_async_context(connected(gateway.url, OTHER_KEY, MODEL))
        assert await refused(gateway, OTHER_KEY) == (503, "too_many_connections")
    async with connected(gateway.url, stack.key, MODEL) as caller:
        assert (await caller.answer(input="hi"))["status"] == "completed"


async def test_requests_of_one_key_leave_connections_to_others(stack: Stack) -> None:
    gateway = stack.gateway(
        api_keys=json.dumps([{"name": "other", "team": "blue", "sha256": digest(OTHER_KEY)}]),
        max_connections=8,
        address_share=1,
    )
    async with contextlib.AsyncExitStack() as held:
        callers = [await held.enter_async_context(connected(gateway.url, stack.key, MODEL)) for _ in range(4)]
        assert await responded(gateway, stack.key) == (429, "too_many_requests")
        assert await responded(gateway, OTHER_KEY) == (200, "")
        await callers[0].connection.close()
        async with asyncio.timeout(10):
            while await responded(gateway, stack.key) != (200, ""):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)


async def test_requests_of_all_keys_of_a_team_leave_connections_to_others(stack: Stack) -> None:
    """A manager makes as many keys as it likes."""
    names = {f"pk-red-{number}-0123456789": f"red-{number}" for number in range(3)}
    records = [{"name": name, "team": "red", "sha256": digest(key)} for key, name in names.items()]
    gateway = stack.gateway(api_keys=json.dumps(records), max_connections=8, address_share=1)
    one, two, three = names
    async with contextlib.AsyncExitStack() as held:
        for key in (one, one, one, two, two, two):
            await held.enter_async_context(connected(gateway.url, key, MODEL))
        assert await responded(gateway, three) == (429, "too_many_requests")
        assert await responded(gateway, stack.key) == (200, "")


async def test_a_team_remembers_so_much_over_all_of_its_sockets(stack: Stack, gateway: Process) -> None:
    text = "x" * (TEXT_BYTES - 100_000)
    async with contextlib.AsyncExitStack() as held:
        callers = [await held.enter_async_context(connected(gateway.url, stack.key, MODEL)) for _ in range(3)]
        ids = [(await each.answer(input=text, store=False, generate=False))["id"] for each in callers]
        status, error = await callers[0].refusal(input="x", store=False, generate=False, previous_response_id=ids[0])
        assert (status, error["code"]) == (400, "previous_response_not_found")
        await callers[2].answer(input="x", store=False, generate=False, previous_response_id=ids[2])


async def test_what_closed_sockets_have_left_is_given_back(stack: Stack, gateway: Process) -> None:
    process = psutil.Process(gateway.pid)
    quiet = process.memory_info().rss
    for _ in range(NUM_SOCKETS):
        async with connected(gateway.url, stack.key, MODEL) as caller:
            await caller.answer(input="x" * TEXT_BYTES, store=False, generate=False)
    await until(lambda: process.memory_info().rss < quiet + SPARE_BYTES, 10.0, "it is given back")
