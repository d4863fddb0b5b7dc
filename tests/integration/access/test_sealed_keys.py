"""Keys in Redis: gateways take those that a holder of the gateway secret wrote, and `paddock key` writes them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis.asyncio

from accounts.protocol.records import AccessRecord, digest, encode_record, first_record, open_record, seal_record
from gateway.access import first_key
from gateway.access.key_store import KeyStore
from gateway.access.keys import Keys
from gateway.commands import key
from gateway.errors import AuthenticationFailed
from gateway.settings import known_settings
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
    assert "paddock key add" in line
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


def names_in(server: RedisServer) -> set[str]:
    """Names of the records in Redis."""

    async def asked() -> set[str]:
        async with connect(server.url_of("gateway")) as client:
            return {
                str(name, "utf-8") if isinstance(name, bytes) else name for name in await client.hkeys(keys.ACCESS_KEYS)
            }

    return asyncio.run(asked())


def run(*args: str) -> int:
    return key.main(args, known_settings())


@pytest.fixture
def flags(server: RedisServer, tmp_path: Path) -> list[str]:
    """Of a gateway's container."""
    return ["--redis-url", server.url_of("gateway"), "--gateway-secret", SECRET, "--state-dir", str(tmp_path)]


def test_a_key_is_added_listed_and_removed(
    server: RedisServer, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("add", "--name", "first", "--team", "red", *flags) == 2, "that one is preset"
    capsys.readouterr()
    assert run("add", "--name", "ci", "--team", "red", "--alias", "small", "--weight", "3", *flags) == 0
    key, record, _ = (line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines())
    assert json.loads(record)["aliases"] == ["small"]
    assert run("add", "--name", "old", "--sha256", digest("pk-old"), "--fields", '{"admin": true}', *flags) == 0
    assert "pk-" not in capsys.readouterr().out
    assert run("list", *flags) == 0
    names = ["ci", *(["first"] if "first" in names_in(server) else []), "old"]
    assert [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()] == names

    async def taken() -> list[bool]:
        async with connect(server.url_of("gateway")) as client:
            target = await known(client, [])
            return [admits(target, each) for each in (key, "pk-old")]

    assert asyncio.run(taken()) == [True, True]
    assert run("remove", "--name", "ci", *flags) == 0
    assert asyncio.run(taken()) == [False, True]
    assert run("remove", "--name", "ci", *flags) == 2
    assert run("remove", "--name", "old", *flags) == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["make", "--name", "first"], "PADDOCK_API_KEY"),
        (["make"], "name"),
        (["make", "--name", "x", "--weight", "0"], "weight"),
        (["make", "--name", "x", "--fields", "{"], "docs/keys.md"),
        (["make", "--name", "x", "--fields", '{"teem": 1}'], "teem"),
        (["make", "--name", "x", "--sha256", "abc"], "sha256"),
        (["mend"], "invalid choice"),
    ],
)
def test_a_flag_that_is_wrong_is_one_line(
    args: list[str], words: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*args, *flags) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert words in lines[0]


def test_without_the_secret_nothing_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("make", "--name", "ci", "--state-dir", str(tmp_path)) == 2
    assert "--gateway-secret" in capsys.readouterr().err
    (tmp_path / "gateway-secret").write_text(SECRET + "\n")
    assert run("make", "--name", "ci", "--state-dir", str(tmp_path)) == 0
    sealed = capsys.readouterr().out.splitlines()[-1].removeprefix("in Redis ")
    assert open_record(sealed.encode(), SECRET).name == "ci"
