"""An intruder who has a worker's login to Redis, and no secret: what it makes gateways tell it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
import redis
from msgspec.structs import replace

from tests.support.caller import calling
from tests.support.redis_server import PASSWORDS
from tests.support.stack import Stack
from workers.protocol import keys
from workers.protocol.heartbeat import BEAT, PLACING, SEAL, decode_heartbeat, encode_heartbeat, placing_of, record_of
from workers.protocol.keys import user_of

MODEL, OTHER = "small", "large"
PROMPT = "a prompt for none but the workers of this fleet"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        running.fake_worker(MODEL, "--step-ms", "2", "--tokens", "4", worker_id="true")
        running.gateway(queue_timeout_s=1)
        yield running


@pytest.fixture
def intruder(stack: Stack) -> Iterator[redis.Redis]:
    """Whoever holds a worker's login, and has seen what stands in its records."""
    login = {"username": user_of("worker"), "password": PASSWORDS["worker"]}
    with redis.Redis(unix_socket_path=str(stack.redis.socket), **login) as client:  # type: ignore[arg-type]
        yield client


@asynccontextmanager
async def ear() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that answers nothing: its URL, and all that it is sent."""
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(65536))
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heard


def record_in(client: redis.Redis, model: str, worker: str) -> dict[bytes, bytes]:
    name = keys.worker(model, worker)
    fields = (BEAT, SEAL, PLACING)
    found = {field.encode(): cast(bytes | None, client.hget(name, field)) for field in fields}
    return {field: value for field, value in found.items() if value is not None}


def put(client: redis.Redis, model: str, worker: str, fields: dict[bytes, bytes]) -> None:
    """As a worker writes its own."""
    client.sadd(keys.MODELS, model)
    client.sadd(keys.workers(model), worker)
    client.hset(keys.worker(model, worker), mapping=fields)  # type: ignore[arg-type]
    client.pexpire(keys.worker(model, worker), 3000)
    client.publish(keys.FLEET_CHANNEL, keys.worker(model, worker))


async def test_a_forged_record_is_sent_no_prompt_and_no_secret(stack: Stack, intruder: redis.Redis) -> None:
    true = decode_heartbeat(record_in(intruder, MODEL, "true")[BEAT.encode()])
    async with ear() as (address, heard), calling(stack.gateways[0].url, stack.key, MODEL) as caller:
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            forged = replace(true, worker="forged", boot="forged", address=address, slots=64)
            put(intruder, MODEL, "forged", {**record_of(forged, "guessed")})
            # The true worker's record, with an address of one's own in both places where it stands.
            written = record_in(intruder, MODEL, "true")
            moved = replace(decode_heartbeat(written[BEAT.encode()]), address=address)
            placing = placing_of(moved).encode()
            put(
                intruder, MODEL, "moved", {**written, BEAT.encode(): encode_heartbeat(moved), PLACING.encode(): placing}
            )
            intruder.hset(keys.worker(MODEL, "true"), PLACING, placing)
            status, body = await caller.whole(messages=[{"role": "user", "content": PROMPT}])
            assert status == 200, body
        assert heard == []
        async with caller.session.get(f"{caller.url}/metrics") as page:
            lines = (await page.text()).splitlines()
    counted = next(line for line in lines if line.startswith('paddock_redis_records_refused_total{kind="record"}'))
    assert float(counted.rpartition(" ")[2]) > 0
    assert sum("not sealed" in line for line in stack.gateways[0].text().splitlines()) == 2, "once per worker"


async def test_a_true_record_serves_no_other_model_and_no_other_address(stack: Stack, intruder: redis.Redis) -> None:
    written = record_in(intruder, MODEL, "true")
    async with ear() as (address, heard), calling(stack.gateways[0].url, stack.key, OTHER) as caller:
        for _ in range(4):
            put(intruder, OTHER, "true", written)
            put(intruder, OTHER, "false", {**written, b"address": address.encode()})
            await asyncio.sleep(0.25)
            status, body = await caller.whole(messages=[{"role": "user", "content": PROMPT}])
            assert status in (404, 503), body
        assert heard == []
    assert written[SEAL.encode()]


async def test_a_record_of_a_dead_process_whose_address_is_somebody_elses_now(
    stack: Stack, intruder: redis.Redis
) -> None:
    """Replayed word by word it is believed, but whoever listens there has to prove the secret before it gets a call."""
    async with ear() as (address, heard), calling(stack.gateways[0].url, stack.key, "left") as caller:
        process = stack.fake_worker("left", "--address", address, worker_id="gone", wait=True)
        stack.workers.remove(process)
        written = record_in(intruder, "left", "gone")
        process.kill()
        for _ in range(4):
            put(intruder, "left", "gone", written)
            await asyncio.sleep(0.1)
            assert (await caller.whole(messages=[{"role": "user", "content": PROMPT}]))[0] >= 500
        assert heard, "gateways ask whether it is the worker"
    assert not [said for said in heard if PROMPT.encode() in said or stack.secret.encode() in said]
