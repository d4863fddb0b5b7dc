"""System prompts that the catalog marks shareable, through a real worker process and two teams."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from tests.integration.service.conftest import ROOT, Process, RedisServer
from tests.integration.service.wire import SECRET, Gateway
from workers.protocol import keys
from workers.protocol.events import Finished
from workers.protocol.exits import Exit
from workers.protocol.framing import SUBMIT_PATH
from workers.protocol.heartbeat import decode_heartbeat
from workers.protocol.requests import GenerateRequest, Message, Sampling, Submit

DEMO = ROOT / "deploy" / "demo" / "paddock-demo.gguf"

MARKED = "You are the help desk of a large company.\nAnswer in two sentences, and be kind."
OTHER = "You are the other desk of a large company.\nAnswer in two sentences, and be kind."


def start(redis: RedisServer, folder: Path, shared: str) -> Process:
    argv = [sys.executable, "-m", "workers.cli", "worker", "--model", str(DEMO), "--alias", "demo"]
    argv += ["--redis-url", redis.url, "--worker-id", "shares", "--slots", "2", "--kv-tokens", "1024", "--ctx", "512"]
    return Process([*argv, "--llama", '{"n_threads": 1}', "--shared-prompts", shared], folder, ENVIRONMENT)


ENVIRONMENT = {"PADDOCK_WORKER_SECRET": SECRET}


@pytest.fixture(scope="module")
def address(redis_server: RedisServer, folder: Path) -> Iterator[str]:
    process = start(redis_server, folder, json.dumps([MARKED]))
    try:
        deadline = time.monotonic() + 30
        while not (record := redis_server.client.hget(keys.worker("demo", "shares"), "beat")):
            assert time.monotonic() < deadline, process.errors()
            time.sleep(0.02)
        assert isinstance(record, bytes)
        yield decode_heartbeat(record).address
    finally:
        process.kill()


async def cached(gateway: Gateway, number: int, tenant: str, system: str, text: str) -> int:
    request = GenerateRequest(
        messages=(Message("system", system), Message("user", text)), sampling=Sampling(temperature=0), max_tokens=2
    )
    submit = Submit(gateway="g", call=number, request=request, tenant=tenant)
    status, body = await gateway.post(SUBMIT_PATH, msgspec.json.encode(submit))
    assert status == 202, body
    await gateway.heard.until_end(number)
    end = gateway.heard.end(number)
    assert isinstance(end, Finished)
    return end.usage.cached_tokens


async def test_the_marked_prompt_is_computed_once_for_all_teams(session: aiohttp.ClientSession, address: str) -> None:
    gateway = Gateway(session, address)
    async with gateway.connected():
        assert await cached(gateway, 1, "red", MARKED, "Where is my red parcel?") == 0
        shared = await cached(gateway, 2, "blue", MARKED, "Where is my red parcel?")
        again = await cached(gateway, 3, "blue", MARKED, "Where is my red parcel?")
        third = await cached(gateway, 4, "green", MARKED, "Something else")
    assert 0 < shared == third < again, "what follows the marked text is each team's own"


async def test_another_prompt_is_not(session: aiohttp.ClientSession, address: str) -> None:
    gateway = Gateway(session, address)
    async with gateway.connected():
        assert await cached(gateway, 11, "red", OTHER, "Hello") == 0
        assert await cached(gateway, 12, "blue", OTHER, "Hello") == 0
        assert await cached(gateway, 13, "blue", OTHER, "Hello") > 0


def test_a_setting_that_is_no_list_of_texts_ends_the_start(redis_server: RedisServer, folder: Path) -> None:
    process = start(redis_server, folder, "[1]")
    try:
        assert process.wait(30) == Exit.USAGE
        assert "shared_prompts: Expected `str`, got `int`" in process.errors()
    finally:
        process.kill()
