"""Which first key is valid when gateways, files and settings differ: what Redis holds stays, unless one is preset."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis.asyncio

from accounts.protocol.records import AccessRecord, first_record, open_record
from gateway.access import first_key
from gateway.access.key_store import KeyStore
from gateway.access.keys import Keys
from gateway.errors import AuthenticationFailed
from gateway.store.client import connect
from tests.support.redis_server import RedisServer
from workers.protocol import keys

SECRET = "of-gateways"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect(server.url) as connected:
        await connected.flushall()
        yield connected


def folder(path: Path, key: str) -> Path:
    """A state folder with a key in it."""
    path.mkdir()
    (path / "first-key").write_text(key + "\n")
    return path


async def stored(client: redis.asyncio.Redis) -> AccessRecord:
    text = await client.hget(keys.ACCESS_KEYS, "first")
    assert text is not None
    return open_record(text, SECRET)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_key_in_a_file_is_announced_to_an_empty_redis(
    client: redis.asyncio.Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = folder(tmp_path / "a", "pk-a")
    for _ in range(2):
        assert await first_key.settle(client, SECRET, "", state) == first_record("pk-a")
    assert await stored(client) == first_record("pk-a")
    assert warnings(caplog) == []


async def test_another_file_does_not_revoke_the_key_of_the_fleet(
    client: redis.asyncio.Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await first_key.settle(client, SECRET, "", folder(tmp_path / "a", "pk-a"))
    other = folder(tmp_path / "b", "pk-b")
    assert await first_key.settle(client, SECRET, "", other) == first_record("pk-a")
    assert await stored(client) == first_record("pk-a")
    assert (other / "first-key").read_text() == "pk-b\n", "the operator's file is left alone"
    (line,) = warnings(caplog)
    assert str(other / "first-key") in line
    assert "PADDOCK_API_KEY" in line
    assert "pk-" not in line


async def test_a_preset_key_replaces_it_and_says_so(
    client: redis.asyncio.Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = folder(tmp_path / "a", "pk-a")
    await first_key.settle(client, SECRET, "", state)
    for _ in range(2):
        assert await first_key.settle(client, SECRET, "pk-preset", state) == first_record("pk-preset")
    assert await stored(client) == first_record("pk-preset")
    (line,) = warnings(caplog)
    assert "replaces the first key" in line


async def test_a_record_that_cannot_be_read_does_not_stop_the_start(
    client: redis.asyncio.Redis, tmp_path: Path
) -> None:
    await client.hset(keys.ACCESS_KEYS, "first", '{"shape": "of another version"}')
    assert await first_key.settle(client, SECRET, "", folder(tmp_path / "a", "pk-a")) == first_record("pk-a")


async def test_a_gateway_whose_file_lost_gives_an_emptied_redis_the_key_that_was_valid(
    client: redis.asyncio.Redis, tmp_path: Path
) -> None:
    await first_key.settle(client, SECRET, "", folder(tmp_path / "a", "pk-a"))
    known = Keys()
    first = await first_key.settle(client, SECRET, "", folder(tmp_path / "b", "pk-b"))
    key_store = KeyStore(client, SECRET, known, (), first)
    await client.flushall()
    await key_store.refresh()
    assert await stored(client) == first_record("pk-a")
    assert known.authenticate([(b"x-api-key", b"pk-a")]).key_id == "first"
    with pytest.raises(AuthenticationFailed):
        known.authenticate([(b"x-api-key", b"pk-b")])
