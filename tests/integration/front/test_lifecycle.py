"""The life of a gateway process: starting, stopping, dying, and what it says when it cannot start."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import redis

from accounts.protocol.key_format import PATTERN, is_whole
from accounts.protocol.records import AccessRecord, digest, open_record, seal_record
from gateway.admission.admission import KNOWN_AFTER_S
from tests.support.caller import calling
from tests.support.stack import Process, Stack
from tests.support.waiting import until
from workers.protocol import keys
from workers.protocol.exits import Exit

QUICKLY_S = 10.0


@contextlib.contextmanager
def one_more(stack: Stack, **settings: object) -> Iterator[Process]:
    """A gateway beside the shared ones; ends with the block."""
    process = stack.gateway(wait=True, **settings)
    stack.gateways.remove(process)
    try:
        yield process
    finally:
        process.stop()


@pytest.mark.parametrize(
    ("first", "further"),
    [(signal.SIGTERM, None), (signal.SIGHUP, signal.SIGHUP)],
    ids=["told to end", "terminal closed, which the shell and the kernel tell"],
)
async def test_a_drained_stream_finishes_and_new_calls_are_refused(
    stack: Stack, first: signal.Signals, further: signal.Signals | None
) -> None:
    with one_more(stack, drain_s=10) as process:
        async with calling(process.url, stack.key, "slow") as caller, caller.stream(max_tokens=60) as stream:
            await stream.until_text()
            process.signal(first)
            await until(lambda: "gateway stopping" in process.text(), 2.0, "it has begun to drain")
            if further is not None:
                process.signal(further)
            async with caller.session.get(f"{process.url}/ready") as ready:
                assert ready.status == 503
            async with caller.session.post(f"{process.url}/v1/chat/completions", json=caller.body()) as refused:
                body = await refused.json()
            assert (refused.status, body["error"]["code"]) == (503, "stopping")
            assert refused.headers["connection"] == "close"
            assert int(refused.headers["retry-after"]) >= 1
            await stream.finish()
            assert stream.finish_reason == "length"
            assert stream.error is None
        assert process.popen.wait(QUICKLY_S) == Exit.OK
    assert stack.leases("slow") == 0


@pytest.mark.parametrize("impatient", [False, True])
async def test_a_stream_that_outlasts_the_drain_ends_with_an_error(stack: Stack, impatient: bool) -> None:
    with one_more(stack, drain_s=30 if impatient else 0.3) as process:
        async with calling(process.url, stack.key, "slow") as caller, caller.stream() as stream:
            await stream.until_text()
            process.signal(signal.SIGTERM)
            if impatient:
                await until(lambda: "gateway stopping" in process.text(), 2.0, "it has begun to drain")
                process.signal(signal.SIGINT)
            await stream.finish()
        assert stream.error is not None
        assert stream.error["code"] == "stopping"
        assert stream.done
        assert process.popen.wait(QUICKLY_S) == Exit.DRAIN_CUT
    assert stack.leases("slow") == 0
    assert "Traceback" not in process.text()


async def test_a_gateway_that_waits_for_redis_can_be_stopped(stack: Stack, tmp_path: Path) -> None:
    process = stack.gateway(wait=False, redis_url=f"unix://{tmp_path}/none.sock", redis_wait_s=60)
    stack.gateways.remove(process)
    await until(lambda: "does not answer yet" in process.text(), QUICKLY_S, "it waits")
    assert process.stop(QUICKLY_S) == Exit.OK
    assert "Traceback" not in process.text()


async def test_two_gateways_that_start_at_once_agree_on_the_first_key(tmp_path: Path) -> None:
    """On one machine they share the file; on two, Redis decides and only one key is ever shown."""
    folders = {"a": tmp_path / "one", "b": tmp_path / "one", "c": tmp_path / "other"}
    with Stack() as own:
        processes = {name: own.gateway(wait=False, api_key="", state_dir=folder) for name, folder in folders.items()}
        for process in processes.values():
            await until(lambda p=process: "gateway ready" in p.text(), QUICKLY_S, "it runs")  # type: ignore[misc]
        files = [folder / "first-key" for folder in sorted(set(folders.values())) if (folder / "first-key").exists()]
        assert len(files) == 1
        assert stat.S_IMODE(files[0].stat().st_mode) == 0o600
        assert [path.name for path in files[0].parent.iterdir()] == ["first-key"]
        key = files[0].read_text().strip()
        assert re.fullmatch(PATTERN, key)
        assert is_whole(key)
        for process in processes.values():
            async with calling(process.url, key, "m") as asking:
                async with asking.session.get(f"{process.url}/v1/models") as response:
                    assert response.status == 200
                async with asking.session.get(f"{process.url}/ready") as response:
                    assert response.status == 503
                    assert "no worker" in (await response.json())["error"]["message"]
            assert key not in process.text()
        with redis.Redis(unix_socket_path=str(own.redis.socket)) as client:
            stored = client.hgetall(keys.ACCESS_KEYS)
            assert isinstance(stored, dict)
        assert key not in repr(stored)
        assert open_record(stored[b"first"], own.gateway_secret).sha256 == digest(key)
        # A key added in Redis is valid on every gateway within seconds.
        record = AccessRecord(name="late", team="green", sha256=digest("pk-late"))
        with redis.Redis(unix_socket_path=str(own.redis.socket)) as client:
            client.hset(keys.ACCESS_KEYS, "late", seal_record(record, own.gateway_secret))
        await _accepted(processes["c"], "pk-late")
        await _redis_comes_and_goes(own, processes["a"], key)


async def _accepted(process: Process, key: str) -> None:
    async with calling(process.url, key, "m") as asking, asyncio.timeout(QUICKLY_S):
        while True:
            async with asking.session.get(f"{process.url}/v1/models") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.1)


async def _redis_comes_and_goes(own: Stack, process: Process, key: str) -> None:
    """A stream goes on, new calls work, `/ready` says how, an empty Redis gets the first key again."""
    worker = own.fake_worker("m", "--step-ms", "20", "--tokens", "200")
    await _ready(process)
    await asyncio.sleep(KNOWN_AFTER_S + keys.GATEWAY_INTERVAL_S)  # then all three gateways know one another
    async with calling(process.url, key, "m") as asking, asking.stream() as stream:
        await stream.until_text()
        own.redis.kill()
        async with asking.session.get(f"{process.url}/ready") as response:
            assert response.status == 200
            body = await response.json()
        assert (body["status"], body["without_redis"]) == ("degraded", ["m"])
        async with asking.session.get(f"{process.url}/health") as response:
            assert response.status == 200
        status, _ = await asking.whole(max_tokens=1)
        assert status == 200
        own.redis.start()
        await _ready(process)
        await _accepted(process, key)
        status, _ = await asking.whole(max_tokens=1)
        assert status == 200
        await stream.finish()
        assert stream.error is None
        assert stream.text.endswith("t199 ")
    worker.kill()


async def _ready(process: Process) -> None:
    async with aiohttp.ClientSession() as session, asyncio.timeout(QUICKLY_S):
        while True:
            async with session.get(f"{process.url}/ready") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.05)


async def test_a_crowd_without_a_key_asks_redis_once_for_all(stack: Stack, gateway: Process) -> None:
    """Each `GET /ready` took a connection to Redis of its own, and anybody may ask."""
    with redis.Redis(unix_socket_path=str(stack.redis.socket)) as client:

        def pings() -> int:
            return int(dict(client.info("commandstats")).get("cmdstat_ping", {}).get("calls", 0))

        before, connected = pings(), int(dict(client.info("clients"))["connected_clients"])
        connector = aiohttp.TCPConnector(limit=100)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def ask() -> int:
                async with session.get(f"{gateway.url}/ready") as response:
                    return response.status

            assert set(await asyncio.gather(*(ask() for _ in range(600)))) == {200}
        assert pings() - before < 120
        assert int(dict(client.info("clients"))["connected_clients"]) < connected + 20
