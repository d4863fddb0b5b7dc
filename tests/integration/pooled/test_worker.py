"""Whole worker processes: what goes over the wire, who is refused, how they end."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import gguf
import msgspec
import numpy as np
import pytest

from tests.integration.pooled.conftest import DEMO
from tests.integration.service.conftest import Process, RedisServer
from tests.integration.service.wire import Gateway
from workers.engine.pooled.jobs import Vectors
from workers.engine.step.shares import MIN_OVERDRAFT
from workers.protocol import keys
from workers.protocol.events import Failure, FailureCode
from workers.protocol.exits import FINAL, Exit
from workers.protocol.heartbeat import Heartbeat, decode_heartbeat
from workers.protocol.pooled import POOL_PATH, PoolKind, PoolRequest, PoolResult, decode_result

SECRET = "a-secret"

LONG = PoolRequest(inputs=(tuple([300] * 512),) * 400)
"""More than half a minute of work for the demo model on one core."""

Start = Callable[..., Process]


@pytest.fixture(scope="module")
def start(redis_server: RedisServer, folder: Path) -> Iterator[Start]:
    """Starts a worker for this model with these `llama` settings and flags."""
    started: list[Process] = []

    def start(path: Path, name: str, llama: dict[str, object] | None = None, *flags: str) -> Process:
        environment = {
            "PADDOCK_REDIS_URL": redis_server.url,
            "PADDOCK_WORKER_SECRET": SECRET,
            "PADDOCK_STATE_DIR": str(folder),
            "OMP_NUM_THREADS": "1",
            "GGML_NO_BACKTRACE": "1",
        }
        settings = json.dumps({"n_threads": 1, **(llama or {})})
        argv = [sys.executable, "-m", "workers.cli", "worker", "--model", str(path), "--alias", name]
        started.append(Process([*argv, "--worker-id", "w", "--llama", settings, *flags], folder, environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def beat_of(redis_server: RedisServer, process: Process, name: str) -> Heartbeat:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        data = redis_server.client.hget(keys.worker(name, "w"), "beat")
        if isinstance(data, bytes):
            beat = decode_heartbeat(data)
            process.address = beat.address
            return beat
        time.sleep(0.02)
    raise AssertionError(process.errors())


@pytest.fixture(scope="module")
def embedder(start: Start, redis_server: RedisServer) -> Process:
    flags = ("--slots", "2", "--ctx", "512", "--worker-drain-s", "0.1")
    process = start(DEMO, "embedder", {"embeddings": True, "n_ubatch": 64}, *flags)
    beat = beat_of(redis_server, process, "embedder")
    assert (beat.kind, beat.slots, beat.n_ctx, beat.kv_tokens) == ("embed", 2, 512, 1024)
    assert beat.overdraft == MIN_OVERDRAFT
    return process


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def pool(gateway: Gateway, request: PoolRequest) -> PoolResult | Failure:
    status, body = await gateway.post(POOL_PATH, msgspec.json.encode(request))
    if status == 200:
        return decode_result(body)
    return msgspec.json.decode(body, type=Failure)


def matrix(answer: PoolResult | Failure) -> Vectors:
    assert isinstance(answer, PoolResult), answer
    return np.frombuffer(answer.vectors, dtype="<f4").reshape(sum(answer.rows), answer.width)


async def until_busy(gateway: Gateway, *, busy: bool = True) -> None:
    async with asyncio.timeout(20):
        while True:
            _, health = await gateway.get("/health")
            if bool(json.loads(health)["slots_busy"]) is busy:
                return
            await asyncio.sleep(0.005)


async def test_texts_and_tokens_come_back_in_order(session: aiohttp.ClientSession, embedder: Process) -> None:
    gateway = Gateway(session, embedder.address, "g", SECRET)
    asked = PoolRequest(inputs=("A short text", (300, 301, 302), "one " * 150, "x" * 5000), request_id="r")
    answer = await pool(gateway, msgspec.structs.replace(asked, inputs=asked.inputs[:3]))
    assert isinstance(answer, PoolResult)
    assert (answer.pooling, answer.rows, answer.num_tokens[1]) == ("last", (1, 1, 1), 3)
    assert answer.num_tokens[2] > 64
    assert np.linalg.norm(matrix(answer), axis=1) == pytest.approx([1, 1, 1], abs=1e-6)
    again = await pool(gateway, msgspec.structs.replace(asked, inputs=asked.inputs[2::-1], normalize=-1))
    raw = matrix(again)
    for a, b in zip(matrix(answer)[::-1], raw, strict=True):
        assert np.dot(a, b) / np.linalg.norm(b) > 0.999
    long = await pool(gateway, asked)
    assert isinstance(long, Failure)
    assert (long.code, long.param) == (FailureCode.CONTEXT_OVERFLOW, "input")
    assert "input 3" in long.message


async def test_how_long_calls_take_is_told(
    session: aiohttp.ClientSession, embedder: Process, redis_server: RedisServer
) -> None:
    await pool(Gateway(session, embedder.address, "g", SECRET), PoolRequest(inputs=("one",)))
    async with asyncio.timeout(5):
        while not beat_of(redis_server, embedder, "embedder").load.hold_ms:  # noqa: ASYNC110 - Redis holds it
            await asyncio.sleep(0.05)
    assert not redis_server.client.exists(keys.worker_heads("embedder", "w"))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (PoolRequest(inputs=()), "at least one"),
        (PoolRequest(inputs=((10**6,),)), "token 1000000"),
        (PoolRequest(inputs=("x",), normalize=-2), "normalize"),
        (PoolRequest(inputs=("x",), kind="rank", query="q"), "embeddings only"),
    ],
)
async def test_what_is_wrong_is_said(
    session: aiohttp.ClientSession, embedder: Process, body: PoolRequest, told: str
) -> None:
    failure = await pool(Gateway(session, embedder.address, "g", SECRET), body)
    assert isinstance(failure, Failure)
    assert told in failure.message


async def test_other_work_is_refused(session: aiohttp.ClientSession, embedder: Process) -> None:
    gateway = Gateway(session, embedder.address, "g", SECRET)
    failure = await gateway.submit(1)
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.UNSUPPORTED
    assert "embeddings" in failure.message
    status, body = await gateway.post(POOL_PATH, b'{"inputs": [1.5]}')
    assert (status, b"worker protocol" in body) == (400, True)
    status, _ = await Gateway(session, embedder.address, "g", "wrong").post(POOL_PATH, b"{}")
    assert status == 401
    status, body = await gateway.get("/health")
    assert json.loads(body)["kind"] == "embed"


async def test_a_peer_that_leaves_cancels_its_call(session: aiohttp.ClientSession, embedder: Process) -> None:
    gateway = Gateway(session, embedder.address, "g", SECRET)
    call = asyncio.create_task(pool(gateway, LONG))
    await until_busy(gateway)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    await until_busy(gateway, busy=False)
    assert len(matrix(await pool(gateway, PoolRequest(inputs=("still here",))))) == 1
    _, metrics = await gateway.get("/metrics")
    assert b'llamacpp:requests_processing{model_name="embedder"} 0.0' in metrics


async def test_a_reranker(
    session: aiohttp.ClientSession, start: Start, redis_server: RedisServer, reranker_file: Path
) -> None:
    process = start(reranker_file, "reranker")
    assert beat_of(redis_server, process, "reranker").kind == "rank"
    gateway = Gateway(session, process.address, "g", SECRET)
    answer = await pool(gateway, PoolRequest(kind="rank", query="a field", inputs=("a paddock", "the stock market")))
    assert isinstance(answer, PoolResult)
    assert (answer.pooling, answer.width, answer.rows) == ("rank", 1, (1, 1))
    assert len(set(matrix(answer)[:, 0].tolist())) == 2
    kind: PoolKind
    for kind, query, inputs, told in (
        ("rank", None, ("a",), "`query` is missing"),
        ("rank", "q", ((1, 2),), "texts"),
        ("embed", None, ("a",), "ranking documents only"),
    ):
        failure = await pool(gateway, PoolRequest(kind=kind, query=query, inputs=inputs))
        assert isinstance(failure, Failure)
        assert told in failure.message


async def test_a_worker_for_text_says_how_to_get_vectors(
    session: aiohttp.ClientSession, start: Start, redis_server: RedisServer
) -> None:
    process = start(DEMO, "text", None, "--slots", "1", "--ctx", "256")
    assert beat_of(redis_server, process, "text").kind == "generate"
    failure = await pool(Gateway(session, process.address, "g", SECRET), PoolRequest(inputs=("x",)))
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.UNSUPPORTED
    assert "embeddings: true" in failure.message


async def test_a_draining_worker_finishes_what_is_in(
    session: aiohttp.ClientSession, start: Start, redis_server: RedisServer
) -> None:
    process = start(DEMO, "drains", {"pooling": "mean"}, "--ctx", "512")
    beat_of(redis_server, process, "drains")
    gateway = Gateway(session, process.address, "g", SECRET)
    asked = PoolRequest(inputs=(tuple([300] * 512),) * 10)
    running = asyncio.create_task(pool(gateway, asked))
    await until_busy(gateway)
    process.signal(signal.SIGTERM)
    refused = None
    while not isinstance(refused, Failure):
        refused = await pool(gateway, PoolRequest(inputs=("x",)))
    assert refused.code is FailureCode.DRAINING
    assert len(matrix(await running)) == 10
    assert await asyncio.to_thread(process.wait) == Exit.OK


def with_token_types_in_f16(source: Path, target: Path) -> None:
    """BERT as it is, but for one tensor's type, which llama.cpp checks when it adds it, by an assertion."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "bert")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0], field.types[1] if field.types[1:] else None)
    for tensor in reader.tensors:
        data = tensor.data.astype(np.float16) if tensor.name == "token_types.weight" else tensor.data
        writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_model_that_makes_llama_cpp_abort_ends_its_worker_only(
    start: Start, redis_server: RedisServer, embedder: Process, bert_file: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken-bert.gguf"
    with_token_types_in_f16(bert_file, broken)
    process = start(broken, "broken")
    assert process.wait(30) == -signal.SIGABRT
    assert -signal.SIGABRT not in FINAL  # the supervisor starts it again, later each time
    assert "GGML_ASSERT" in process.errors() or "ggml" in process.errors()
    assert redis_server.client.hget(keys.worker("broken", "w"), "beat") is None
    assert beat_of(redis_server, embedder, "embedder").kind == "embed"


async def test_a_call_that_takes_longer_than_the_drain_is_cut_with_a_word(
    session: aiohttp.ClientSession, embedder: Process
) -> None:
    """The last test of this file: it ends the worker that the others share."""
    gateway = Gateway(session, embedder.address, "g", SECRET)
    running = asyncio.create_task(pool(gateway, LONG))
    await until_busy(gateway)
    embedder.signal(signal.SIGTERM)
    failure = await running
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.DRAINING
    assert await asyncio.to_thread(embedder.wait) == Exit.DRAIN_CUT
