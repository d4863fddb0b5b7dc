"""Workers that stop, fail, die or stand in a bad network."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec

from tests.integration.service.conftest import RedisServer, Spawn, start_fake
from tests.integration.service.wire import SECRET, Gateway, words
from tests.support.worker_access import drain_headers_of
from workers.protocol import keys
from workers.protocol.control import LEAVE_PATH, decode_leaving
from workers.protocol.events import Failed, Failure, FailureCode, Finished
from workers.protocol.exits import Exit
from workers.protocol.heartbeat import Heartbeat, ModelFacts, decode_heartbeat, record_of
from workers.service.registration.heartbeat import Registration, connect

FAST = ("--step-ms", "5", "--slots", "2")


def record(redis_server: RedisServer, model: str, worker: str) -> Heartbeat | None:
    data = redis_server.client.hget(keys.worker(model, worker), "beat")
    assert data is None or isinstance(data, bytes)
    return decode_heartbeat(data) if data else None


async def test_draining_lets_running_calls_finish_and_takes_no_new_ones(
    session: aiohttp.ClientSession, spawn: Spawn, redis_server: RedisServer
) -> None:
    worker = spawn(*FAST, "--tokens", "200", "--model", "drain", "--worker-id", "w")
    gateway = Gateway(session, worker.address)
    async with gateway.connected() as heard:
        await gateway.submit(1)
        await heard.until(lambda: heard.events)
        await _until(lambda: record(redis_server, "drain", "w"))
        before = record(redis_server, "drain", "w")
        worker.signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        refused = await gateway.submit(2)
        during = record(redis_server, "drain", "w")
        await heard.until_end(1)
        await asyncio.wait_for(heard.over.wait(), 2)
    assert isinstance(refused, Failure)
    assert refused.code is FailureCode.DRAINING
    assert heard.text(1) == words(200)
    assert isinstance(heard.end(1), Finished)
    assert before is not None
    assert not before.draining
    assert during is not None
    assert during.draining
    assert worker.wait() == Exit.OK
    assert record(redis_server, "drain", "w") is None


async def test_a_worker_that_leaves_lets_its_calls_finish(
    session: aiohttp.ClientSession, spawn: Spawn, redis_server: RedisServer
) -> None:
    """However long they take: `--drain-s` is for whoever stops it."""
    flags = ("--tokens", "200", "--drain-s", "0.1", "--model", "leave", "--worker-id", "w")
    worker = spawn(*FAST, *flags)
    gateway = Gateway(session, worker.address)
    async with gateway.connected() as heard:
        await gateway.submit(1)
        await heard.until(lambda: heard.events)
        await _until(lambda: record(redis_server, "leave", "w"))
        status, told = await gateway.post(LEAVE_PATH, b"")
        assert (status, decode_leaving(told).num_calls) == (200, 1)
        refused = await gateway.submit(2)
        await _until(lambda: (beat := record(redis_server, "leave", "w")) is not None and beat.draining)
        await heard.until_end(1)
        await asyncio.wait_for(heard.over.wait(), 2)
    assert isinstance(refused, Failure)
    assert refused.code is FailureCode.DRAINING
    assert heard.text(1) == words(200)
    assert isinstance(heard.end(1), Finished)
    assert worker.wait() == Exit.DRAINED
    assert record(redis_server, "leave", "w") is None


async def test_a_worker_that_leaves_can_be_stopped_as_any_other(session: aiohttp.ClientSession, spawn: Spawn) -> None:
    worker = spawn(*FAST, "--tokens", "100000", "--drain-s", "0.2")
    gateway = Gateway(session, worker.address)
    async with gateway.connected() as heard:
        await gateway.submit(1)
        await heard.until(lambda: heard.events)
        assert (await gateway.post(LEAVE_PATH, b""))[0] == 200
        worker.signal(signal.SIGTERM)
        await heard.until_end(1)
    assert isinstance(heard.end(1), Failed)
    assert worker.wait() == Exit.DRAIN_CUT


async def test_a_worker_that_leaves_and_crashes_has_crashed(session: aiohttp.ClientSession, spawn: Spawn) -> None:
    worker = spawn(*FAST, "--tokens", "1000", "--crash-after", "150")
    gateway = Gateway(session, worker.address)
    async with gateway.connected() as heard:
        await gateway.submit(1)
        await gateway.submit(2)
        assert (await gateway.post(LEAVE_PATH, b""))[0] == 200
        await heard.until_end(1, 2)
    assert worker.wait() == Exit.CRASHED


async def test_who_may_have_a_worker_leave(session: aiohttp.ClientSession, spawn: Spawn) -> None:
    worker = spawn(*FAST)
    for headers in ({}, drain_headers_of(worker.address, SECRET), {"Authorization": f"Bearer {SECRET}"}):
        async with session.post(f"{worker.address}{LEAVE_PATH}", headers=headers) as response:
            assert response.status == 401
    async with session.get(f"{worker.address}/ready") as response:
        assert response.status == 200


async def test_without_the_secret_no_body_is_read(spawn: Spawn) -> None:
    address = urlsplit(spawn(*FAST).address)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(b"POST /v1/submit HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (100 << 20))
        async with asyncio.timeout(5):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b"connection: close" in answer
    finally:
        writer.transport.abort()


async def test_calls_past_the_drain_bound_are_cut_in_stream(session: aiohttp.ClientSession, spawn: Spawn) -> None:
    worker = spawn(*FAST, "--tokens", "100000", "--drain-s", "0.2")
    gateway = Gateway(session, worker.address)
    async with gateway.connected() as heard:
        await gateway.submit(1)
        await heard.until(lambda: heard.events)
        worker.signal(signal.SIGTERM)
        await heard.until_end(1)
    end = heard.end(1)
    assert isinstance(end, Failed)
    assert end.failure.code is FailureCode.DRAINING
    assert heard.text(1) == words(len(heard.of(1)) - 2), "everything up to the cut arrived"
    assert worker.wait() == Exit.DRAIN_CUT


async def test_a_second_signal_stops_at_once(session: aiohttp.ClientSession, spawn: Spawn) -> None:
    worker = spawn(*FAST, "--tokens", "100000", "--drain-s", "60")
    gateway = Gateway(session, worker.address)
    async with gateway.connected() as heard:
        await gateway.submit(1)
        await heard.until(lambda: heard.events)
        worker.signal(signal.SIGINT)
        await asyncio.sleep(0.1)
        worker.signal(signal.SIGINT)
        await heard.until_end(1)
    assert worker.wait(3) == Exit.DRAIN_CUT


async def test_a_crashed_engine_ends_every_call_in_stream(session: aiohttp.ClientSession, spawn: Spawn) -> None:
    worker = spawn(*FAST, "--crash-after", "5")
    gateway = Gateway(session, worker.address)
    async with gateway.connected() as heard:
        await gateway.submit(1)
        await gateway.submit(2)
        await heard.until_end(1, 2)
    ends = [heard.end(1), heard.end(2)]
    assert [end.failure.code for end in ends if isinstance(end, Failed)] == [FailureCode.INTERNAL] * 2
    assert worker.wait() == Exit.CRASHED
    assert "the engine failed" in worker.errors()


async def test_what_no_engine_may_say_of_a_call_ends_that_call_and_not_the_worker(
    session: aiohttp.ClientSession, spawn: Spawn
) -> None:
    worker = spawn(*FAST, "--garble-after", "5")
    gateway = Gateway(session, worker.address)
    async with gateway.connected() as heard:
        for number in (1, 2):
            await gateway.submit(number)
            await heard.until_end(number)
            end = heard.end(number)
            assert isinstance(end, Failed)
            assert end.failure.code is FailureCode.INTERNAL
    worker.signal(signal.SIGTERM)
    assert worker.wait() == Exit.OK
    assert "can't be passed on" in worker.errors()


async def test_an_answer_that_fails_in_the_middle(session: aiohttp.ClientSession, spawn: Spawn) -> None:
    worker = spawn(*FAST, "--fail-after", "3")
    gateway = Gateway(session, worker.address)
    async with gateway.connected() as heard:
        await gateway.submit(1)
        await heard.until_end(1)
    assert heard.text(1) == words(3)
    assert isinstance(heard.end(1), Failed)


async def test_a_worker_that_dies(session: aiohttp.ClientSession, spawn: Spawn) -> None:
    worker = spawn(*FAST, "--die-after", "4")
    gateway = Gateway(session, worker.address)
    async with gateway.connected() as heard:
        await gateway.submit(1)
        await asyncio.wait_for(heard.over.wait(), 5)
    assert worker.wait() == -signal.SIGKILL
    assert heard.end(1) is None


async def test_a_worker_that_refuses(session: aiohttp.ClientSession, spawn: Spawn) -> None:
    failure = await Gateway(session, spawn("--refuse", "draining").address).submit(1)
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.DRAINING


async def test_a_worker_that_hangs_can_be_left(session: aiohttp.ClientSession, spawn: Spawn) -> None:
    worker = spawn("--hang")
    gateway = Gateway(session, worker.address)
    async with gateway.connected() as heard:
        await gateway.submit(1)
        await asyncio.sleep(0.1)
        assert heard.events == []
        await gateway.cancel(1)
        worker.signal(signal.SIGTERM)
        await asyncio.wait_for(heard.over.wait(), 3)
    assert worker.wait() == Exit.OK


async def test_a_network_that_cuts_the_stream_every_few_writes(session: aiohttp.ClientSession, spawn: Spawn) -> None:
    worker = spawn(*FAST, "--tokens", "60", "--drop-stream-every", "9")
    gateway = Gateway(session, worker.address)
    connections = 0
    await gateway.submit(1)
    while not gateway.heard.end(1):
        connections += 1
        async with gateway.connected() as heard:
            done = asyncio.ensure_future(heard.until_end(1))
            over = asyncio.ensure_future(heard.over.wait())
            await asyncio.wait([done, over], return_when=asyncio.FIRST_COMPLETED)
            done.cancel()
            over.cancel()
    assert connections > 3
    assert gateway.heard.text(1) == words(60)
    assert gateway.heard.alive == []


async def test_redis_may_come_and_go_while_a_worker_serves(
    session: aiohttp.ClientSession, short_folder: Path, folder: Path
) -> None:
    server = RedisServer(short_folder)
    server.start()
    process = None
    try:
        from_start = server.client.pubsub()  # type: ignore[no-untyped-call]
        from_start.subscribe(keys.FLEET_CHANNEL)
        process = start_fake(server.url, folder, *FAST, "--model", "m", "--worker-id", "w")
        await _until(lambda: record(server, "m", "w"))
        ttl_ms = server.client.pttl(keys.worker("m", "w"))
        assert isinstance(ttl_ms, int)
        assert 0 < ttl_ms <= keys.HEARTBEAT_TTL_S * 1000
        assert server.client.smembers(keys.workers("m")) == {b"w"}
        await _until(lambda: server.client.smembers(keys.MODELS) == {b"m"})
        heard = [message for _ in range(10) if (message := from_start.get_message(timeout=0.1))]
        assert [message["data"] for message in heard if message["type"] == "message"] == [b"pd:{m}:worker:w"]
        from_start.close()

        server.stop()
        gateway = Gateway(session, process.address)
        async with gateway.connected() as events:
            await gateway.submit(1, max_tokens=5)
            await events.until_end(1)
        assert events.text(1) == words(5)
        await asyncio.sleep(0.6)

        server.start()
        await _until(lambda: record(server, "m", "w"))
        process.signal(signal.SIGTERM)
        assert process.wait() == Exit.OK, process.errors()
        assert record(server, "m", "w") is None
    finally:
        if process is not None:
            process.kill()
        server.client.close()
        server.stop()


def test_a_start_without_redis_gives_up(folder: Path) -> None:
    process = start_fake(f"unix://{folder}/nobody.sock", folder, "--redis-wait-s", "0.3")
    try:
        assert process.wait() == Exit.NO_REDIS
        assert "Redis did not answer" in process.errors()
    finally:
        process.kill()


async def test_leaving_takes_away_ones_own_record_only(redis_server: RedisServer) -> None:
    facts = ModelFacts(n_ctx_train=1, n_params=1, size=1, n_vocab=1)
    place = {"worker": "w", "model": "heir", "address": "http://w", "slots": 1, "slots_busy": 0, "n_ctx": 1}
    old = msgspec.convert({**place, "boot": "old", "kv_tokens": 1, "kv_tokens_used": 0, "facts": facts}, Heartbeat)
    heir = msgspec.structs.replace(old, boot="heir")
    name = keys.worker("heir", "w")
    redis = connect(redis_server.url)
    try:
        redis_server.client.hset(name, mapping=record_of(heir, "secret"))
        await Registration(redis, "secret", lambda: old).leave()
        assert record(redis_server, "heir", "w") == heir
        redis_server.client.hset(name, "beat", b"of a later version")
        await Registration(redis, "secret", lambda: old).leave()
        assert redis_server.client.exists(name)
        await Registration(redis, "secret", lambda: heir).leave()
        assert record(redis_server, "heir", "w") is None
    finally:
        await redis.aclose()


async def _until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - Redis holds what is waited for
            await asyncio.sleep(0.02)
