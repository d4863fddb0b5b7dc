"""A gateway without file descriptors, or with as many connections as it may have: streams go on, probes are answered,
and nobody is reset. A worker without descriptors: its questions go to another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import shutil
import socket
import time
from collections.abc import AsyncGenerator
from urllib.parse import urlsplit

import aiohttp
import psutil

from tests.fault.rest import at_rest
from tests.support.stack import DEMO_MODEL, Process, Stack

MODEL = "steady"
TOKENS, STEP_MS = 250, 20
MOST_GAP_S = 1.0
"""On a machine that others use as well; a gap was as long as the trouble."""
HALF_A_HEAD = b"GET /v1/models HTTP/1.1\r\nx: "


@contextlib.asynccontextmanager
async def with_a_stream(stack: Stack, gateway: Process) -> AsyncGenerator[None]:
    """Another caller's answer, from before the block until behind it, with no error and no long gap."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": TOKENS}
    headers = {"Authorization": f"Bearer {stack.key}"}
    gaps: list[float] = []
    begun = asyncio.Event()

    async def read() -> bytes:
        last, line = time.monotonic(), b""
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{gateway.url}/v1/chat/completions", json=body) as answer,
        ):
            assert answer.status == 200
            async for got in answer.content:
                line = got.strip() or line
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
                begun.set()
        return line

    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(read())
        await begun.wait()
        del gaps[:]
        yield
        assert not reading.done()
    assert reading.result() == b"data: [DONE]"
    assert max(gaps) < MOST_GAP_S


async def asked(gateway: Process, path: str, key: str = "") -> bytes:
    """What is answered, up to the end of the connection. Raises OSError where there is no answer."""
    address = urlsplit(gateway.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        bearer = f"authorization: Bearer {key}\r\n" if key else ""
        writer.write(f"GET {path} HTTP/1.1\r\n{bearer}connection: close\r\n\r\n".encode())
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def half_heads(gateway: Process, count: int) -> AsyncGenerator[None]:
    address, loop = urlsplit(gateway.url), asyncio.get_running_loop()
    with contextlib.ExitStack() as held:
        for _ in range(count):
            connection = held.enter_context(socket.socket())
            connection.setblocking(False)
            await loop.sock_connect(connection, (address.hostname, address.port))
            with contextlib.suppress(OSError):  # refused already
                await loop.sock_sendall(connection, HALF_A_HEAD)
        yield


async def test_out_of_descriptors(stack: Stack) -> None:
    stack.fake_worker(MODEL, "--step-ms", str(STEP_MS), "--tokens", str(TOKENS))
    gateway = stack.gateway()
    num_open = psutil.Process(gateway.pid).num_fds()
    before = resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE)
    async with with_a_stream(stack, gateway):
        resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (num_open - 8, before[1]))
        for _ in range(3):
            assert (await asked(gateway, "/health")).startswith(b"HTTP/1.1 200 ")
            refused = await asked(gateway, "/v1/models", stack.key)
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        async with half_heads(gateway, 40):
            for _ in range(3):
                assert (await asked(gateway, "/health")).startswith(b"HTTP/1.1 200 ")
        resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, before)
        await asyncio.sleep(0.5)
        assert (await asked(gateway, "/v1/models", stack.key)).startswith(b"HTTP/1.1 200 ")
    await at_rest(stack, MODEL)


async def num_workers(session: aiohttp.ClientSession, gateway: Process) -> int:
    """Return how many workers of the model the gateway knows."""
    async with session.get(f"{gateway.url}/v1/models/{MODEL}") as answer:
        return int((await answer.json())["workers"])


async def test_a_worker_out_of_descriptors(stack: Stack) -> None:
    """It refuses the connection, which is not the caller's: no 429 for a caller with one."""
    worker = stack.fake_worker(MODEL)
    gateway = stack.gateway()
    url, question = f"{gateway.url}/tokenize", {"model": MODEL, "content": "hi"}
    before = resource.prlimit(worker.pid, resource.RLIMIT_NOFILE)
    num_open = psutil.Process(worker.pid).num_fds()
    resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (num_open - 8, before[1]))
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {stack.key}"}) as session:
        async with session.post(url, json=question) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["type"]) == (503, "unavailable_error"), error
        stack.fake_worker(MODEL)
        async with asyncio.timeout(10):
            while await num_workers(session, gateway) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        async with session.post(url, json=question) as answer:
            assert answer.status == 200, await answer.text()
    await at_rest(stack, MODEL)


async def test_an_adapter_that_a_worker_has_no_descriptor_for(stack: Stack) -> None:
    """Neither who loads it nor who calls it is told that the request is wrong."""
    folder = stack.folder / "adapters"
    folder.mkdir()
    for name in ("p.gguf", "q.gguf"):
        shutil.copy(DEMO_MODEL.with_name("paddock-demo-pirate-lora.gguf"), folder / name)
    worker = stack.worker(DEMO_MODEL, MODEL, slots=2, ctx=256, adapters_dir=folder, max_adapters=1)
    gateway = stack.gateway()
    stack.wait_until_listed(gateway, MODEL)
    before = resource.prlimit(worker.pid, resource.RLIMIT_NOFILE)
    async with aiohttp.ClientSession(gateway.url, headers={"Authorization": f"Bearer {stack.key}"}) as session:

        async def load(name: str) -> tuple[int, str]:
            asked = {"lora_name": name, "lora_path": f"{name}.gguf", "model": MODEL}
            async with session.post("/v1/load_lora_adapter", json=asked) as answer:
                return answer.status, await answer.text()

        async def call(name: str) -> tuple[int, str]:
            asked = {"model": name, "prompt": "Once", "max_tokens": 2}
            async with session.post("/v1/completions", json=asked) as answer:
                return answer.status, await answer.text()

        assert (await load("p"))[0] == 200
        assert (await call(MODEL))[0] == 200  # from now on the worker has its connections
        resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (8, before[1]))
        for status, told in (await load("q"), await call("p")):
            assert (status, json.loads(told)["error"]["type"]) == (503, "unavailable_error"), told
        resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, before)
        assert (await load("q"))[0] == 200
    await at_rest(stack, MODEL)


async def test_idle_connections_with_half_a_head(stack: Stack) -> None:
    stack.fake_worker(MODEL, "--step-ms", str(STEP_MS), "--tokens", str(TOKENS))
    gateway = stack.gateway(max_connections=200, address_share=1)
    async with with_a_stream(stack, gateway), half_heads(gateway, 1024):
        for path in ("/health", "/ready", "/metrics"):
            assert (await asked(gateway, path)).startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(1.2)
        # They have been idle for long enough to make room.
        assert (await asked(gateway, "/v1/models", stack.key)).startswith(b"HTTP/1.1 200 ")
    await at_rest(stack, MODEL)
