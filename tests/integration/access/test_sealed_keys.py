"""Keys in Redis: gateways take those that a holder of the gateway secret wrote."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis.asyncio

from accounts.protocol.records import AccessRecord, digest, encode_record, first_record, open_record, seal_record
from gateway.access import first_key
from gateway.access.key_store import KeyStore
from gateway.access.keys import Keys
from gateway.errors import AuthenticationFailed
from gateway.store.client import connect
from gateway.store.outage import Unreadable
from tests.support.redis_server import RedisServer
from workers.protocol import keys

SECRET = "of-gateways"
ADMIN = AccessRecord(name="mine", sha256=digest("pk-mine"), admin=True)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect(server.url_of("gateway")) as connected:
        await connected.delete(keys.ACCESS_KEYS, keys.ACCESS_SUBJECTS, keys.ACCESS_CHANGES)
        yield connected


async def known(client: redis.asyncio.Redis, refused: list[str]) -> Keys:
    """What a gateway takes, after two readings."""
    target = Keys()
    store = KeyStore(client, SECRET, target, (), first_record("pk-first"), Unreadable(refused.append))
    for _ in range(2):
        await store.refresh()
    return target


def admits(target: Keys, key: str) -> bool:
    try:
        return target.authenticate([(b"x-api-key", key.encode())]).key_id != ""
    except AuthenticationFailed:
        return False


@pytest.mark.parametrize(
    "value",
    [
        encode_record(ADMIN),
        seal_record(ADMIN, "of-workers"),
        b"0" * 64 + b" " + encode_record(ADMIN),
        seal_record(AccessRecord(name="mine", sha256=ADMIN.sha256), SECRET)[:65] + encode_record(ADMIN),
        b" " + encode_record(ADMIN),
        b"\xff\xfe" + encode_record(ADMIN),
        b"",
    ],
)
async def test_a_record_without_the_right_seal_makes_no_key(
    client: redis.asyncio.Redis, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await client.hset(keys.ACCESS_KEYS, "mine", value)
    refused: list[str] = []
    target = await known(client, refused)
    assert not admits(target, "pk-mine")
    assert admits(target, "pk-first")
    assert refused == ["pd:keys"]
    [line] = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert "paddock keys create" in line
    assert "PADDOCK_GATEWAY_SECRET" in line


async def test_a_forged_first_record_does_not_replace_the_first_key(
    client: redis.asyncio.Redis, tmp_path: Path
) -> None:
    forged = first_record("pk-forged")
    for value in (encode_record(forged), seal_record(forged, "of-workers")):
        await client.hset(keys.ACCESS_KEYS, "first", value)
        target = await known(client, [])
        assert not admits(target, "pk-forged")
        first = await first_key.settle(client, SECRET, "", tmp_path)
        assert first.sha256 != forged.sha256


async def test_a_first_record_of_an_earlier_version_is_written_anew(
    client: redis.asyncio.Redis, tmp_path: Path
) -> None:
    await client.hset(keys.ACCESS_KEYS, "first", encode_record(first_record("pk-old")))
    (tmp_path / "first-key").write_text("pk-old\n")
    assert await first_key.settle(client, SECRET, "", tmp_path) == first_record("pk-old")
    value = await client.hget(keys.ACCESS_KEYS, "first")
    assert value is not None
    assert open_record(value, SECRET) == first_record("pk-old")
