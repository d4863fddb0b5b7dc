"""Callers who ask for large answers and don't read them: what is ready for them is counted, and bounded."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import aiohttp
import psutil
import pytest

from tests.support.stack import Process, Stack

WIDTH = 4096
INSTRUCTIONS = "x" * 900_000
MAX_ADDED_BYTES = 320 << 20
"""Twice what requests may hold together; these callers took 830 to 890 MiB."""
WATCHED_S = 3.0
PAUSE_S = 0.02
"""Between two requests."""


@pytest.fixture(scope="module")
def wide() -> Iterator[Stack]:
    with Stack() as running:
        running.fake_worker(
            "vec", "--kind", "embed", "--width", str(WIDTH), "--ctx", "512", slots=16, worker_id="vec-1"
        )
        running.fake_worker("quick", "--step-ms", "1", "--tokens", "4", "--ctx", "4000000")
        yield running


@pytest.fixture
def gateway(wide: Stack) -> Iterator[Process]:
    process = wide.gateway()
    yield process
    process.stop()
    wide.gateways.remove(process)


@asynccontextmanager
async def unread(gateway: Process, requests: list[bytes]) -> AsyncIterator[list[socket.socket]]:
    """Send requests whose answers nobody reads."""
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    loop, connections = asyncio.get_running_loop(), []
    try:
        for request in requests:
            connection = socket.socket()
            connections.append(connection)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            await loop.sock_connect(connection, (host, int(port)))
            await loop.sock_sendall(connection, request)
            await asyncio.sleep(PAUSE_S)
        yield connections
    finally:
        for connection in connections:
            connection.close()


async def most_added(gateway: Process, requests: list[bytes]) -> tuple[int, set[bytes]]:
    """Return the bytes by which the gateway grew, and the statuses of the answers."""
    process, loop = psutil.Process(gateway.pid), asyncio.get_running_loop()
    quiet = most = int(process.memory_info().rss)
    async with unread(gateway, requests) as connections:
        until = loop.time() + WATCHED_S
        while loop.time() < until:
            most = max(most, int(process.memory_info().rss))
            await asyncio.sleep(0.02)
        heads = [await asyncio.wait_for(loop.sock_recv(one, 12), 20.0) for one in connections]
    return most - quiet, {head.split()[1] for head in heads}


def request_of(stack: Stack, line: str, body: bytes = b"") -> bytes:
    head = f"{line} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {stack.key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("path", "name", "num_inputs", "num_requests"),
    [("/v1/embeddings", "input", 2048, 6), ("/embedding", "content", 128, 100)],
)
async def test_embeddings(
    wide: Stack, gateway: Process, path: str, name: str, num_inputs: int, num_requests: int
) -> None:
    body = json.dumps({"model": "vec", name: ["a"] * num_inputs}).encode()
    added, statuses = await most_added(gateway, [request_of(wide, f"POST {path}", body)] * num_requests)
    assert added < MAX_ADDED_BYTES, f"{added >> 20} MiB"
    assert {b"200", b"429"} <= statuses <= {b"200", b"429", b"503"}, "what is ready is counted"


async def num_computed(stack: Stack, session: aiohttp.ClientSession) -> int:
    """Return how many requests for vectors the worker has answered."""
    beat = stack.heartbeat("vec", "vec-1")
    assert beat is not None
    async with session.get(f"{beat.address}/metrics") as response:
        text = await response.text()
    (count,) = re.findall(r"^vllm:e2e_request_latency_seconds_count\S* (\S+)$", text, re.MULTILINE)
    return int(float(count))


async def test_embeddings_that_would_take_too_much_are_refused_before_they_are_computed(
    wide: Stack, gateway: Process
) -> None:
    """They were computed, sent to the gateway, and refused then: of 16, 14, and 480 MiB that nothing counted."""
    headers = {"authorization": f"Bearer {wide.key}"}
    body = {"model": "vec", "input": ["a"] * 2048, "encoding_format": "base64"}
    async with aiohttp.ClientSession() as session:
        before = await num_computed(wide, session)

        async def status() -> int:
            async with session.post(f"{gateway.url}/v1/embeddings", json=body, headers=headers) as response:
                await response.read()
                return response.status

        statuses = await asyncio.gather(*[status() for _ in range(16)])
        assert set(statuses) == {200, 429}
        assert await num_computed(wide, session) - before == statuses.count(200)


async def test_embeddings_that_are_sent_in_parts_arrive_whole(wide: Stack, gateway: Process) -> None:
    headers = {"authorization": f"Bearer {wide.key}"}
    body = {"model": "vec", "input": ["a"] * 64}
    async with aiohttp.ClientSession() as session:
        for _ in range(4):  # what the ones before held is given back
            async with session.post(f"{gateway.url}/v1/embeddings", json=body, headers=headers) as response:
                answer = await response.json()
            assert [len(one["embedding"]) for one in answer["data"]] == [WIDTH] * 64


async def test_what_is_stored(wide: Stack, gateway: Process) -> None:
    """The whole answer was one write, whose memory was given back while it lay in the transport: 137 MiB."""
    headers = {"authorization": f"Bearer {wide.key}", "content-type": "application/json"}
    data = io.BytesIO(json.dumps({"model": "quick", "input": "x" * (7 << 20)}).encode())
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{gateway.url}/v1/responses", data=data, headers=headers) as response:
            path = f"/v1/responses/{(await response.json())['id']}/input_items"
        added, statuses = await most_added(gateway, [request_of(wide, f"GET {path}")] * 120)
        assert added < MAX_ADDED_BYTES // 5, f"{added >> 20} MiB"
        assert {b"200", b"429"} <= statuses <= {b"200", b"429", b"503"}, "what is sent is counted"
        async with asyncio.timeout(10):
            while True:  # what was not read is given back with its connection
                async with session.get(f"{gateway.url}{path}", headers=headers) as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.1)
            async with session.get(f"{gateway.url}{path}", headers=headers) as response:
                (item,) = (await response.json())["data"]
        assert item["content"][0]["text"] == "x" * (7 << 20)


@pytest.mark.long
async def test_streams_of_a_stored_response(wide: Stack, gateway: Process) -> None:
    headers = {"authorization": f"Bearer {wide.key}", "content-type": "application/json"}
    asked = {"model": "quick", "input": "hi", "instructions": INSTRUCTIONS, "background": True, "stream": True}
    data = io.BytesIO(json.dumps(asked).encode())
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{gateway.url}/v1/responses", data=data, headers=headers) as response:
            text = await response.text()
        id_ = text.split('"id":"resp_')[1].split('"')[0]
        await asyncio.sleep(1.0)  # it ends, and is read out of Redis from then on
        path = f"/v1/responses/resp_{id_}?stream=true"
        added, statuses = await most_added(gateway, [request_of(wide, f"GET {path}")] * 150)
        assert added < MAX_ADDED_BYTES, f"{added >> 20} MiB"
        assert {b"200", b"429"} <= statuses <= {b"200", b"429", b"503"}
        await asyncio.sleep(1.0)
        async with session.get(f"{gateway.url}{path}", headers=headers) as response:
            assert response.status == 200
            assert "response.completed" in await response.text()
