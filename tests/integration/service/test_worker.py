"""A whole worker process: a real model, a real engine, the exit codes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from gateway.commands.config import metrics_of, worker_groups
from tests.integration.service.conftest import ROOT, Process, RedisServer
from tests.integration.service.wire import Gateway
from tests.support.scrape import Scrape
from tests.support.tools import tool_of
from tests.support.waiting import until
from workers.metrics.readings import FORM_OUTCOMES
from workers.process.sockets import listen
from workers.protocol import keys
from workers.protocol.events import Failure, FailureCode, Finished, FinishReason, ToolCallDelta
from workers.protocol.exits import Exit
from workers.protocol.heartbeat import decode_heartbeat
from workers.protocol.requests import Accepted, Constraint, Sampling
from workers.settings import WorkerSettings
from workers.worker import run

DEMO = ROOT / "deploy" / "demo" / "paddock-demo.gguf"
SECRET = "a-secret"

Start = Callable[..., Process]


@pytest.fixture(scope="module")
def start(redis_server: RedisServer, folder: Path) -> Iterator[Start]:
    """Starts `paddock worker` with these flags."""
    started: list[Process] = []

    def start(*flags: str, **variables: str) -> Process:
        environment = {
            "PADDOCK_REDIS_URL": redis_server.url,
            "PADDOCK_WORKER_SECRET": SECRET,
            "PADDOCK_STATE_DIR": str(folder),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        argv = [sys.executable, "-m", "workers.cli", "worker", "--llama", '{"n_threads": 1}', *flags]
        started.append(Process(argv, folder, environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def address_of(redis_server: RedisServer, process: Process, model: str) -> str:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        data = redis_server.client.hget(keys.worker(model, "w"), "beat")
        if isinstance(data, bytes):
            return decode_heartbeat(data).address
        time.sleep(0.02)
    raise AssertionError(process.errors())


@pytest.fixture(scope="module")
def demo(start: Start, redis_server: RedisServer) -> Process:
    process = start("--model", str(DEMO), "--alias", "demo", "--worker-id", "w", "--slots", "4", "--ctx", "512")
    process.address = address_of(redis_server, process, "demo")
    return process


async def test_the_demo_model_answers_and_calls_tools(session: aiohttp.ClientSession, demo: Process) -> None:
    gateway = Gateway(session, demo.address, "tools", SECRET)
    tool = tool_of("get_weather", "Look it up", {"type": "object", "properties": {"city": {"type": "string"}}})
    greedy = Sampling(temperature=0.0)
    async with gateway.connected() as heard:
        accepted = await gateway.submit(1, "What are you?", max_tokens=60, sampling=greedy)
        await gateway.submit(2, "What is the weather in Paris?", max_tokens=100, sampling=greedy, tools=(tool,))
        await heard.until_end(1, 2)
    assert isinstance(accepted, Accepted)
    assert "model" in heard.text(1)
    end = heard.end(2)
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.TOOL_CALLS
    deltas = [event for event in heard.of(2) if isinstance(event, ToolCallDelta)]
    assert deltas[0].name == "get_weather"
    assert json.loads("".join(event.arguments for event in deltas)) == {"city": "Paris"}


async def test_metrics_show_what_a_second_call_shares(session: aiohttp.ClientSession, demo: Process) -> None:
    gateway = Gateway(session, demo.address, "metrics", SECRET)

    async def scraped() -> dict[str, float]:
        _, body = await gateway.get("/metrics")
        lines = [line for line in body.decode().splitlines() if not line.startswith("#")]
        return {series: float(value) for series, value in (line.rsplit(" ", 1) for line in lines)}

    before = await scraped()
    question = "What should I know about a horse that lives in a paddock with sheep? " * 3
    async with gateway.connected() as heard:
        for call, last in ((1, "Tell me."), (2, "Please.")):
            await gateway.submit(call, question + last, max_tokens=10, ignore_eos=True)
            await heard.until_end(call)
        for call in (3, 4):
            await gateway.submit(call, "Tea?", max_tokens=5, constraint=Constraint("regex", "yes|no"))
            await heard.until_end(call)
    after = await scraped()
    grown = {series: value - before[series] for series, value in after.items() if series in before}
    end = heard.end(2)
    assert isinstance(end, Finished)
    assert end.usage.cached_tokens > 10
    labels = '{model_name="demo"}'
    num_prompt = sum(one.usage.prompt_tokens for call in (1, 2, 3, 4) if isinstance(one := heard.end(call), Finished))
    assert grown[f"vllm:prefix_cache_hits_total{labels}"] >= end.usage.cached_tokens
    assert grown[f"vllm:prefix_cache_queries_total{labels}"] == num_prompt
    assert grown['paddock_prompt_source_tokens_total{model_name="demo",source="kv"}'] >= end.usage.cached_tokens
    assert grown[f"vllm:inter_token_latency_seconds_count{labels}"] >= 2 * 9
    assert grown[f"llamacpp:n_decode_total{labels}"] >= 2 * 10
    assert 0 < after[f"llamacpp:n_busy_slots_per_decode{labels}"] <= 4
    forms = [grown[f'paddock_answer_forms_total{{model_name="demo",outcome="{name}"}}'] for name in FORM_OUTCOMES]
    assert forms == [1, 1, 0]
    cells = [after[f'paddock_kv_cells{{model_name="demo",state="{state}"}}'] for state in ("used", "idle", "free")]
    assert sum(cells) == 4 * 512
    shown = Scrape((await gateway.get("/metrics"))[1].decode())
    shown.has_exactly(metrics_of(worker_groups()))
    assert shown.sum("paddock_worker_info", worker="w", model_name="demo") == 1
    assert shown.value("paddock_worker_slots", model_name="demo") == 4
    assert shown.value("paddock_device_memory_bytes", model_name="demo", device="CPU", state="free") > 0
    assert shown.value("paddock_device_memory_bytes", model_name="demo", device="CPU", state="used") > 0


async def test_a_prompt_longer_than_the_context_names_both_counts(
    session: aiohttp.ClientSession, demo: Process
) -> None:
    failure = await Gateway(session, demo.address, "long", SECRET).submit(1, "word " * 1_000)
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.CONTEXT_OVERFLOW
    numbers = [int(word) for word in failure.message.replace(",", " ").split() if word.isdigit()]
    assert max(numbers) > 1_000
    assert 512 in numbers


async def test_a_signal_ends_the_process_cleanly(session: aiohttp.ClientSession, demo: Process) -> None:
    gateway = Gateway(session, demo.address, "last", SECRET)
    async with gateway.connected() as heard:
        await gateway.submit(1, "Tell me a story about a cat.", max_tokens=100)
        demo.signal(signal.SIGTERM)
        await heard.until_end(1)
        await asyncio.wait_for(heard.over.wait(), 3)
    assert isinstance(heard.end(1), Finished)
    assert await asyncio.to_thread(demo.wait) == Exit.OK
    assert "Traceback" not in demo.errors()


async def test_a_closed_terminal_lets_calls_end(
    session: aiohttp.ClientSession, redis_server: RedisServer, folder: Path
) -> None:
    """SIGHUP comes twice, from the shell and from the kernel."""
    environment = {"PADDOCK_REDIS_URL": redis_server.url, "PADDOCK_WORKER_SECRET": SECRET}
    argv = [sys.executable, "-m", "workers.cli", "worker", "--llama", '{"n_threads": 1}', "--model", str(DEMO)]
    worker = Process(
        [*argv, "--alias", "hung-up", "--worker-id", "w", "--slots", "1", "--ctx", "512"], folder, environment
    )
    try:
        gateway = Gateway(session, address_of(redis_server, worker, "hung-up"), "hung-up", SECRET)
        async with gateway.connected() as heard:
            await gateway.submit(1, "Tell me a story about a cat.", max_tokens=100)
            worker.signal(signal.SIGHUP)
            await until(lambda: "SIGHUP: stopping" in worker.errors(), 5.0, "it has begun to drain")
            worker.signal(signal.SIGHUP)
            await heard.until_end(1)
        assert isinstance(heard.end(1), Finished)
        assert await asyncio.to_thread(worker.wait) == Exit.OK
    finally:
        worker.kill()


def test_a_missing_model_is_one_clear_line(start: Start) -> None:
    process = start("--model", "/nowhere/missing.gguf")
    assert process.wait(30) == Exit.BAD_MODEL, process.errors()
    [line] = process.errors().splitlines()
    assert line.startswith("paddock: ")
    assert "missing.gguf" in line


@pytest.fixture
def own_logging() -> Iterator[None]:
    """`run` takes over the process's logging."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("own_logging")
class TestComplaints:
    """What `run` says when it can't serve: one line, and the code."""

    def complaint(self, capsys: pytest.CaptureFixture[str], expected: Exit, **values: object) -> str:
        settings = WorkerSettings(**{"redis_url": "unix:///nowhere", "worker_secret": SECRET, **values})  # type: ignore[arg-type]
        assert run(settings) == expected
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("paddock: ")]
        assert len(lines) == 1
        return lines[0]

    @pytest.mark.parametrize("name", ["text.gguf", "cut.gguf", "empty.gguf"])
    def test_files_that_are_no_models(self, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
        contents = {"text.gguf": b"hello, I am no model", "empty.gguf": b""}
        path = tmp_path / name
        path.write_bytes(contents[name] if name in contents else DEMO.read_bytes()[: os.path.getsize(DEMO) // 2])
        assert name in self.complaint(capsys, Exit.BAD_MODEL, model=path)

    @pytest.mark.parametrize(
        ("values", "says"),
        [
            ({}, "--model"),
            ({"model": "x.gguf", "redis_url": ""}, "--redis-url"),
            ({"model": "x.gguf", "worker_secret": ""}, "PADDOCK_WORKER_SECRET"),
            ({"model": "x.gguf", "alias": "no spaces please"}, "--alias"),
            ({"model": "x.gguf", "sampling": '{"temperature": "hot"}'}, "temperature"),
            ({"model": "x.gguf", "sampling": '{"temprature": 1}'}, "temprature"),
            ({"model": "x.gguf", "sampling": '{"seed": 4294967296}'}, "seed"),
            ({"model": "x.gguf", "llama": "[]"}, "llama"),
            ({"model": "x.gguf", "worker_host": "192.0.2.1"}, "worker_host"),
            ({"model": str(DEMO), "chat_template": "gone.jinja"}, "chat_template: can't read gone.jinja"),
            (
                {
                    "model": str(DEMO),
                    "chat_template": "<think>{{ messages[0].content }}</think>",
                    "thinking_budget_message": "That is enough.</think>",
                },
                "thinking_budget_message has '</think>' in it",
            ),
        ],
    )
    def test_settings_that_cannot_be_used(
        self, capsys: pytest.CaptureFixture[str], values: dict[str, str], says: str
    ) -> None:
        assert says in self.complaint(capsys, Exit.USAGE, **values)

    def test_a_chat_template_that_does_not_compile(self, capsys: pytest.CaptureFixture[str]) -> None:
        line = self.complaint(capsys, Exit.BAD_MODEL, model=DEMO, chat_template="{% for %}")
        assert "the chat template does not compile" in line

    def test_a_taken_port(self, capsys: pytest.CaptureFixture[str]) -> None:
        with listen("127.0.0.1", 0) as sock:
            port = sock.getsockname()[1]
            assert str(port) in self.complaint(capsys, Exit.PORT_TAKEN, model="x.gguf", worker_port=port)

    def test_a_cache_that_cannot_fit(self, capsys: pytest.CaptureFixture[str]) -> None:
        line = self.complaint(capsys, Exit.NO_MEMORY, model=DEMO, kv_tokens=2_000_000_000)
        assert "--kv-tokens" in line
