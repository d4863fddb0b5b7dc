"""Responses that go on from each other: the whole chain counts, and is looked at before it is loaded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis

from tests.support.caller import Caller, calling, seen
from tests.support.stack import Process, Stack

MAX_BODY_BYTES = 64 << 10
LONG = "x" * 40_000


@pytest.fixture(scope="module")
def small_gateway(stack: Stack) -> Iterator[Process]:
    worker = stack.fake_worker("chained", "--step-ms", "2", "--tokens", "4", "--ctx", "1000000")
    process = stack.gateway(max_body_bytes=MAX_BODY_BYTES, queue_timeout_s=20)
    yield process
    for ended, those in ((process, stack.gateways), (worker, stack.workers)):
        ended.stop()
        those.remove(ended)


@pytest.fixture
async def asker(stack: Stack, small_gateway: Process) -> AsyncIterator[Caller]:
    async with calling(small_gateway.url, stack.key, "chained") as asking:
        yield asking


async def respond(asker: Caller, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": asker.model, "max_output_tokens": 1, **fields}
    async with asker.session.post(f"{asker.url}/v1/responses", json=body) as response:
        return response.status, await response.json()


async def test_a_chain_counts_whole(asker: Caller) -> None:
    previous: str | None = None
    for _ in range(3):
        status, made = await respond(asker, input=LONG, previous_response_id=previous)
        assert status == 200, made
        previous = made["id"]
    status, refused = await respond(asker, input=LONG, previous_response_id=previous)
    assert status == 200, refused
    previous = refused["id"]
    for more in ({}, {"background": True}):
        status, refused = await respond(asker, input="And then?", previous_response_id=previous, **more)
        assert (status, refused["error"]["code"]) == (413, "request_too_large")
        assert f"{2 * MAX_BODY_BYTES} may be gone on from" in refused["error"]["message"]
    body = {"model": asker.model, "input": "And then?", "previous_response_id": previous}
    async with asker.session.post(f"{asker.url}/v1/responses/input_tokens", json=body) as response:
        assert response.status == 413


async def test_what_is_referred_to_counts_each_time(asker: Caller) -> None:
    status, made = await respond(asker, input=LONG)
    assert status == 200
    async with asker.session.get(f"{asker.url}/v1/responses/{made['id']}/input_items") as response:
        item = (await response.json())["data"][0]["id"]
    references = [{"type": "item_reference", "id": item}] * 500
    assert len(json.dumps(references)) < MAX_BODY_BYTES
    status, refused = await respond(asker, input=references)
    assert (status, refused["error"]["code"]) == (413, "request_too_large"), refused
    assert "what is referred to included" in refused["error"]["message"]
    status, _ = await respond(asker, input=references[:2])
    assert status == 200


async def test_what_can_have_no_answer_keeps_no_input(stack: Stack, small_gateway: Process) -> None:
    """A response in the background is stored before anybody finds its prompt too long."""
    stack.fake_worker("short", "--step-ms", "2", "--tokens", "4", "--ctx", "64")
    async with calling(small_gateway.url, stack.key, "short") as asker:
        await seen(asker, 1)
        status, made = await respond(asker, input=LONG, background=True)
        assert status == 200, made
        address = f"{asker.url}/v1/responses/{made['id']}"
        async with asyncio.timeout(30):
            while made["status"] in ("queued", "in_progress"):
                await asyncio.sleep(0.02)
                async with asker.session.get(address) as response:
                    made = await response.json()
        assert (made["status"], made["error"]["code"]) == ("failed", "context_length_exceeded")
        with redis.Redis(unix_socket_path=str(stack.redis.socket)) as store:
            (name,) = store.scan_iter(f"*{made['id']}")
            assert 0 < store.strlen(name) < 4000, "the 40,000 characters were kept"
        status, refused = await respond(asker, input="And then?", previous_response_id=made["id"])
        assert (status, refused["error"]["param"]) == (400, "previous_response_id")
        assert "its prompt was too long" in refused["error"]["message"]
        async with asker.session.get(f"{address}/input_items") as response:
            assert response.status == 404
