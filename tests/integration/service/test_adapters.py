"""LoRA adapters of a real worker process: at the start, over its routes, and in calls."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.integration.service.conftest import ROOT, Process, RedisServer
from tests.integration.service.wire import SECRET, Gateway
from tests.support import adapter_files
from tests.support.worker_access import access_headers
from workers.llama.gguf import read_header
from workers.protocol import keys
from workers.protocol.events import Failure, FailureCode
from workers.protocol.exits import Exit
from workers.protocol.heartbeat import decode_heartbeat
from workers.protocol.queries import ADAPTERS_PATH, AdapterInfo, AdapterState, decode_adapter_infos, decode_info
from workers.protocol.requests import AdapterUse, Sampling

DEMO = ROOT / "deploy" / "demo" / "paddock-demo.gguf"
PIRATE = ROOT / "deploy" / "demo" / "paddock-demo-pirate-lora.gguf"

GREEDY = Sampling(temperature=0)


def start(redis: RedisServer, folder: Path, worker: str, *flags: str) -> Process:
    argv = [sys.executable, "-m", "workers.cli", "worker", "--model", str(DEMO), "--alias", "demo"]
    argv += ["--redis-url", redis.url, "--worker-id", worker, "--slots", "2", "--kv-tokens", "1024", "--ctx", "512"]
    return Process([*argv, "--llama", '{"n_threads": 1}', *flags], folder, {"PADDOCK_WORKER_SECRET": SECRET})


def preloaded(name: str, path: Path) -> str:
    return json.dumps([{"name": name, "path": str(path), "pinned": True}])


@pytest.fixture(scope="module")
def adapters_folder(folder: Path) -> Path:
    """What may be loaded at run time, and a few ways out of it."""
    outside = folder / "outside"
    outside.mkdir()
    shutil.copy(PIRATE, outside / "secret.gguf")
    inside = folder / "adapters"
    (inside / "team").mkdir(parents=True)
    adapter_files.sound(inside / "team" / "one.gguf", read_header(DEMO), size=2.0)
    (inside / "link.gguf").symlink_to(inside / "team" / "one.gguf")
    (inside / "way-out.gguf").symlink_to(outside / "secret.gguf")
    (inside / "circle.gguf").symlink_to(inside / "circle.gguf")
    (inside / "cut.gguf").write_bytes(PIRATE.read_bytes()[:-100])
    os.mkfifo(inside / "pipe.gguf")
    return inside


@pytest.fixture(scope="module")
def address(redis_server: RedisServer, folder: Path, adapters_folder: Path) -> Iterator[str]:
    flags = ("--adapters", preloaded("pirate", PIRATE), "--adapters-dir", str(adapters_folder), "--max-adapters", "2")
    process = start(redis_server, folder, "w", *flags)
    try:
        deadline = time.monotonic() + 30
        while not (record := redis_server.client.hget(keys.worker("demo", "w"), "beat")):
            assert time.monotonic() < deadline, process.errors()
            time.sleep(0.02)
        assert isinstance(record, bytes)
        yield decode_heartbeat(record).address
    finally:
        process.kill()


@pytest.fixture
def gateway(session: aiohttp.ClientSession, address: str, request: pytest.FixtureRequest) -> Gateway:
    return Gateway(session, address, name=request.node.name[:100])


async def load(gateway: Gateway, **fields: Any) -> AdapterInfo | Failure:
    status, body = await gateway.post(ADAPTERS_PATH, json.dumps(fields).encode())
    return decode_info(body) if status == 200 else msgspec.json.decode(body, type=Failure)


async def listed(session: aiohttp.ClientSession, address: str) -> dict[str, AdapterInfo]:
    headers = await access_headers(session, address, SECRET)
    async with session.get(address + ADAPTERS_PATH, headers=headers) as response:
        assert response.status == 200
        return {info.name: info for info in decode_adapter_infos(await response.read())}


async def unload(session: aiohttp.ClientSession, address: str, name: str) -> tuple[int, bytes]:
    headers = await access_headers(session, address, SECRET)
    async with session.delete(f"{address}{ADAPTERS_PATH}/{name}", headers=headers) as response:
        return response.status, await response.read()


async def say(gateway: Gateway, *calls: tuple[AdapterUse, ...]) -> list[str]:
    async with gateway.connected() as heard:
        for number, adapters in enumerate(calls):
            await gateway.submit(number, "Hello!", adapters=adapters, sampling=GREEDY, max_tokens=24)
        await heard.until_end(*range(len(calls)))
        return [heard.text(number) for number in range(len(calls))]


async def test_an_adapter_of_the_start_is_there_and_speaks(
    gateway: Gateway, session: aiohttp.ClientSession, address: str
) -> None:
    info = (await listed(session, address))["pirate"]
    assert (info.state, info.pinned, info.size, info.rank) == (AdapterState.LOADED, True, PIRATE.stat().st_size, 8)
    plain, pirate, off = await say(gateway, (), (AdapterUse("pirate"),), (AdapterUse("pirate", 0.0),))
    assert plain == off
    assert pirate != plain


async def test_loaded_named_and_taken_away_at_run_time(
    gateway: Gateway, session: aiohttp.ClientSession, address: str
) -> None:
    info = await load(gateway, name="team/one", path="team/one.gguf")
    assert isinstance(info, AdapterInfo)
    assert (info.name, info.state, info.rank, info.calls) == ("team/one", AdapterState.KNOWN, 4, 0)
    plain, one = await say(gateway, (), (AdapterUse("team/one"),))
    assert one != plain
    assert (await listed(session, address))["team/one"].state is AdapterState.LOADED
    again = await load(gateway, name="team/one", path="link.gguf")
    assert isinstance(again, AdapterInfo)
    assert again.sha256 == info.sha256
    status, body = await unload(session, address, "team/one?wait_s=10")
    assert status == 200
    assert decode_info(body).state is AdapterState.GONE
    assert set(await listed(session, address)) == {"pirate"}
    refused = await gateway.submit(9, "Hello!", adapters=(AdapterUse("team/one"),))
    assert isinstance(refused, Failure)
    assert refused.message == "no adapter is named 'team/one'; use one of: pirate"
    status, body = await unload(session, address, "team/one")
    assert status == 400
    assert b"no adapter is named" in body


async def test_taking_one_away_waits_for_its_calls(
    gateway: Gateway, session: aiohttp.ClientSession, address: str
) -> None:
    assert isinstance(await load(gateway, name="busy", path="team/one.gguf"), AdapterInfo)
    async with gateway.connected() as heard:
        long = Sampling(temperature=0)
        use = (AdapterUse("busy"),)
        await gateway.submit(0, "Hello!", adapters=use, sampling=long, max_tokens=400, ignore_eos=True)
        status, body = await unload(session, address, "busy?wait_s=0.01")
        left = decode_info(body)
        assert (status, left.state, left.calls) == (200, AdapterState.LEAVING, 1)
        assert isinstance(await load(gateway, name="busy", path="team/one.gguf"), AdapterInfo)
        status, body = await unload(session, address, "busy?wait_s=60")
        assert (status, decode_info(body).state) == (200, AdapterState.GONE)
        await heard.until_end(0)
    status, body = await unload(session, address, "pirate?wait_s=x")
    assert (status, b"wait_s" in body) == (400, True)


async def test_what_is_only_checked_is_not_there(
    gateway: Gateway, session: aiohttp.ClientSession, address: str
) -> None:
    info = await load(gateway, name="looked-at", path="team/one.gguf", check=True)
    assert isinstance(info, AdapterInfo)
    assert set(await listed(session, address)) == {"pirate"}
    other = await load(gateway, name="looked-at", path="team/one.gguf", sha256="00" * 32)
    assert isinstance(other, Failure)
    assert (other.param, "holds other contents" in other.message) == ("path", True)
    assert info.sha256 in other.message


async def test_what_the_settings_name_is_fixed(gateway: Gateway, session: aiohttp.ClientSession, address: str) -> None:
    refused = await load(gateway, name="pirate", path="team/one.gguf")
    assert isinstance(refused, Failure)
    assert "stands in this worker's settings" in refused.message
    status, body = await unload(session, address, "pirate")
    assert (status, b"take it out there" in body) == (400, True)
    assert (await listed(session, address))["pirate"].fixed


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("../outside/secret.gguf", "does not lie in adapters_dir"),
        ("/etc/passwd", "does not lie in adapters_dir"),
        ("way-out.gguf", "does not lie in adapters_dir"),
        ("team/../../outside/secret.gguf", "does not lie in adapters_dir"),
        ("zero\0byte", "does not lie in adapters_dir"),
        ("x" * 4000, "can't be read"),
        ("circle.gguf", "can't be read|does not lie in"),
        ("nothing.gguf", "can't be read"),
        ("team", "is no file"),
        ("pipe.gguf", "is no file"),
        ("cut.gguf", "truncated"),
    ],
)
async def test_files_that_are_not_loaded(gateway: Gateway, path: str, says: str) -> None:
    failure = await load(gateway, name="x", path=path)
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.INVALID_REQUEST
    assert failure.param == "path"
    assert any(part in failure.message for part in says.split("|")), failure.message
    assert str(ROOT) not in failure.message
    assert "outside adapters" not in failure.message


@pytest.mark.parametrize(
    "body", [b"{}", b"[]", b'{"name": "-", "path": "a"}', b'{"name": "a", "path": "a", "x": 1}', b" " * (1 << 17)]
)
async def test_bodies_that_are_no_request(gateway: Gateway, body: bytes) -> None:
    status, answer = await gateway.post(ADAPTERS_PATH, body)
    assert status == 400
    assert b"invalid_request" in answer


async def test_the_routes_are_behind_the_secret(session: aiohttp.ClientSession, address: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        path = ADAPTERS_PATH + ("/pirate" if method == "DELETE" else "")
        async with session.request(method, address + path) as response:
            assert response.status == 401


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (("--adapters", preloaded("a", DEMO)), Exit.BAD_MODEL, "not a LoRA adapter"),
        (("--adapters", preloaded("-", PIRATE)), Exit.USAGE, "adapters:"),
        (("--adapters", preloaded("a", PIRATE), "--adapters-mib", "1", "--max-adapters", "0"), Exit.USAGE, "max"),
    ],
)
def test_a_start_with_a_bad_adapter_ends_with_the_reason(
    redis_server: RedisServer, folder: Path, flags: tuple[str, ...], code: Exit, says: str
) -> None:
    process = start(redis_server, folder, "bad", *flags)
    try:
        assert process.wait(30) == code
        assert says in process.errors()
    finally:
        process.kill()
