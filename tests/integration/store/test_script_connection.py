"""The one connection that a gateway's scripts go over: it is made anew when it breaks, and no answer goes astray."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis.asyncio

from gateway.errors import StoreUnavailable
from gateway.store.scripts import Script, ScriptSender
from tests.support.redis_server import RedisServer, redis_binaries, redis_version
from workers.redis.link import connect

SOURCE = "return ARGV[1]"
ECHO = Script("echo", SOURCE, hashlib.sha1(SOURCE.encode(), usedforsecurity=False).hexdigest())
TIMEOUT_S = 0.3


@pytest.fixture(params=redis_binaries(), ids=redis_version)
def own(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    binary: Path = request.param
    with RedisServer(binary) as running:
        yield running


@pytest.fixture
async def client(own: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect(own.url, timeout_s=TIMEOUT_S, retries=1) as connected:
        yield connected


@pytest.fixture
def sender(client: redis.asyncio.Redis) -> ScriptSender:
    return ScriptSender(client, [ECHO], TIMEOUT_S)


async def echoed(sender: ScriptSender, *words: str) -> list[bytes]:
    return [*await asyncio.gather(*(sender.send(ECHO, "pd:{m}:", word) for word in words))]


async def test_a_server_that_restarted_is_asked_again(own: RedisServer, sender: ScriptSender) -> None:
    """The kept connection is dead, and the new server knows no script."""
    assert await echoed(sender, "a", "b") == [b"a", b"b"]
    own.restart()
    assert await echoed(sender, "c", "d") == [b"c", b"d"]


async def test_answers_that_came_too_late_are_nobodys(own: RedisServer, sender: ScriptSender) -> None:
    assert await echoed(sender, "a") == [b"a"]
    own.pause()
    with pytest.raises(StoreUnavailable):
        await echoed(sender, "b", "c")
    own.resume()
    assert await echoed(sender, "d", "e") == [b"d", b"e"]


async def test_an_error_of_one_script_is_no_other_ones(
    client: redis.asyncio.Redis, sender: ScriptSender, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = Script("wrong", "", "not a digest")
    answers = await asyncio.gather(
        *(sender.send(script, "pd:{m}:", "a") for script in (ECHO, unknown, ECHO)), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [bytes, StoreUnavailable, bytes]
