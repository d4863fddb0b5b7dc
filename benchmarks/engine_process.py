"""Whether the engine and the event loop should share a process: the time of one engine step, four ways.

    python -m benchmarks.engine_process MODEL.gguf --slots 1 16

    alone          the engine's thread, nobody listens
    shared, 5 ms   the worker's own service in the same process, Python's default switch interval
    shared, 0.5 ms the same with the interval that workers set
    own process    the engine in a process of its own, each step's events encoded and handed over a pipe

Every answer is streamed over TCP to a client in another process, spread over `--gateways` event streams. `step` is the
time between two steps on the engine's thread; `delivery` from the end of a step to its arrival in the client. Client
and service want a core besides the engine's: on two cores the third process of `own process` has to share one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

import aiohttp
import msgspec
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry

from tests.support.calls import generate_calls
from workers.chat.prompts import Prompts
from workers.chat.template import ChatTemplate
from workers.engine.cache.prompt import Prompt
from workers.engine.counters import EngineCounters
from workers.engine.engine import Engine
from workers.engine.request import EngineLoad, EngineRequest
from workers.llama.context import Context
from workers.llama.model import Model
from workers.metrics.worker import WorkerMetrics
from workers.models.spec import LlamaSettings
from workers.process.sockets import listen
from workers.protocol.control import access_token
from workers.protocol.events import CallEvent, Finished, WireEvent, decode_step
from workers.protocol.framing import EVENTS_PATH, SUBMIT_PATH, FrameReader, parse_event_id
from workers.protocol.requests import GenerateRequest, Message, Sampling, Submit
from workers.service.calls.live_calls import Engine as CallEngine
from workers.service.calls.stream import Mailbox
from workers.service.lifecycle import Lifecycle, Shortage
from workers.service.routes.app import CallRoutes, WorkerAccess, build_app

WAYS = {"alone": 0.005, "shared, 5 ms": 0.005, "shared, 0.5 ms": 0.0005, "own process": 0.005}
"""Name -> switch interval of the process that holds the engine, seconds."""

SECRET = "benchmark"
WORKER, BOOT = "bench", "boot"
SKIPPED_STEPS = 5
_HEAD = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder(enc_hook=dict).encode  # of its frozen mappings
_decode_request = msgspec.msgpack.Decoder(EngineRequest).decode
_decode_mail = msgspec.msgpack.Decoder(tuple[int, list[WireEvent]]).decode

Emit = Callable[[int, list[CallEvent]], None]


class StepClock:
    """Notes when each step ended, then passes it on."""

    def __init__(self, emit: Emit) -> None:
        self.ended_at: dict[int, float] = {}
        self._emit = emit

    def __call__(self, step: int, events: list[CallEvent]) -> None:
        self.ended_at[step] = time.monotonic()
        self._emit(step, events)


class EngineHost:
    """An engine on a real model, with enough cells for `slots` answers of `num_tokens`."""

    def __init__(self, options: argparse.Namespace, emit: Emit) -> None:
        settings = LlamaSettings(n_threads=1)
        self.model = Model.load(options.model, settings)
        n_ctx = options.tokens + 256
        self._context = Context(self.model, settings, slots=options.slot_count, kv_tokens=options.slot_count * n_ctx)
        self._context.warm_up()
        self.clock = StepClock(emit)
        self.engine = Engine(self.model, self._context, slots=options.slot_count, n_ctx=n_ctx, emit=self.clock)

    def close(self) -> None:
        self.engine.stop()
        self._context.close()
        self.model.close()


class PipedEngine:
    """An engine behind a pipe, as calls see it."""

    def __init__(self, stdin: IO[bytes], n_ctx: int) -> None:
        self.n_ctx = n_ctx
        self._stdin = stdin

    def submit(self, request: EngineRequest) -> None:
        data = _encode(request)
        self._stdin.write(_HEAD.pack(len(data)) + data)
        self._stdin.flush()

    def cancel(self, key: int) -> None:
        """Nobody cancels here."""

    def end(self, key: int, num_tokens: int) -> None:
        """Nobody ends an answer here."""


def run_piped_engine(options: argparse.Namespace) -> None:
    """The engine's own process: requests come on stdin, steps leave on stdout; the steps' times go to `--times`."""
    out = os.dup(1)
    os.dup2(2, 1)  # whatever prints must not disturb the pipe

    def emit(step: int, events: list[CallEvent]) -> None:
        data = _encode((step, events))
        data = _HEAD.pack(len(data)) + data
        while data:
            data = data[os.write(out, data) :]

    host = EngineHost(options, emit)
    host.engine.start()
    while head := sys.stdin.buffer.read(_HEAD.size):
        host.engine.submit(_decode_request(sys.stdin.buffer.read(_HEAD.unpack(head)[0])))
    host.close()
    options.times.write_text(json.dumps(host.clock.ended_at), encoding="ascii")


async def read_steps(stdout: IO[bytes], deliver: Emit) -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), stdout)
    try:
        while True:
            size = _HEAD.unpack(await reader.readexactly(_HEAD.size))[0]
            step, events = _decode_mail(await reader.readexactly(size))
            deliver(step, list[CallEvent](events))
    except asyncio.IncompleteReadError:
        transport.close()


async def serve(options: argparse.Namespace) -> None:
    """The service around an engine, in this process or behind a pipe, until stdin is closed."""
    loop = asyncio.get_running_loop()
    life = Lifecycle()
    mailbox = Mailbox(loop, life.crashed)
    host: EngineHost | None = None
    child: subprocess.Popen[bytes] | None = None
    engine: CallEngine
    if options.way == "own process":
        flags = [
            "--slot-count",
            str(options.slot_count),
            "--tokens",
            str(options.tokens),
            "--times",
            str(options.times),
        ]
        argv = [sys.executable, "-m", "benchmarks.engine_process", str(options.model), "--role", "engine", *flags]
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdin is not None
        engine = PipedEngine(child.stdin, options.tokens + 256)
        model = Model.load(options.model, LlamaSettings())
    else:
        host = EngineHost(options, mailbox.put)
        engine, model = host.engine, host.model
    metrics = WorkerMetrics(
        CollectorRegistry(), "bench", lambda: EngineLoad(options.slot_count, 0, 0, 1, 0), EngineCounters
    )
    prompts = Prompts(ChatTemplate(model.chat_template), model)
    calls, delivery, hub = generate_calls(engine, prompts, metrics, boot=BOOT, mailbox=mailbox, life=life)
    steps = None
    if child is not None:
        assert child.stdout is not None
        steps = asyncio.create_task(read_steps(child.stdout, delivery.deliver))
    app = build_app(
        hub=hub,
        metrics=metrics,
        access=WorkerAccess(SECRET, WORKER, BOOT),
        shortage=Shortage(),
        routes=CallRoutes(calls, BOOT).routes(),
    )
    sock = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", ws="none", log_level="error", access_log=False))
    http = asyncio.create_task(server.serve(sockets=[sock]))
    if host is not None:
        host.engine.start()
    print(f"http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    hub.close()
    server.should_exit = True
    await http
    if host is not None:
        host.close()
        options.times.write_text(json.dumps(host.clock.ended_at), encoding="ascii")
    if child is not None and steps is not None:
        assert child.stdin is not None
        child.stdin.close()
        await steps
        child.wait()
        model.close()


@dataclass(frozen=True)
class Result:
    steps_us: list[float]
    deliveries_us: list[float]
    tokens_per_s: float


def alone(options: argparse.Namespace) -> Result:
    """The engine's thread, and nobody else."""
    done = threading.Semaphore(0)

    def emit(step: int, events: list[CallEvent]) -> None:
        for event in events:
            if isinstance(event, Finished):
                done.release()

    host = EngineHost(options, emit)
    prompt = host.model.tokenize("Tell me a story about a cat.", add_special=True, parse_special=True)
    asked = GenerateRequest(max_tokens=options.tokens, ignore_eos=True)
    for key in range(options.slot_count):
        host.engine.submit(EngineRequest(key, asked, Prompt(prompt), Sampling(temperature=0.0)))
    host.engine.start()
    for _ in range(options.slot_count):
        done.acquire()
    host.close()
    return summarise(options, host.clock.ended_at, {})


def streamed(options: argparse.Namespace, way: str) -> Result:
    """The service in a process of its own, this process as its client."""
    options.times.unlink(missing_ok=True)
    flags = ["--slot-count", str(options.slot_count), "--tokens", str(options.tokens), "--times", str(options.times)]
    argv = [sys.executable, "-m", "benchmarks.engine_process", str(options.model), "--role", "service", "--way", way]
    child = subprocess.Popen([*argv, *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    address = child.stdout.readline().decode().strip()
    arrived = uvloop.run(load(options, address))
    child.stdin.close()
    child.wait()
    ended_at = {int(step): at for step, at in json.loads(options.times.read_text(encoding="ascii")).items()}
    return summarise(options, ended_at, arrived)


async def load(options: argparse.Namespace, address: str) -> dict[int, float]:
    """Submits one call per slot, over the gateways in turn, and reads all streams to the end -> when each step came."""
    arrived: dict[int, float] = {}
    finished = 0
    headers = {"Authorization": f"Bearer {access_token(SECRET, WORKER, BOOT)}"}

    async def listen_to(session: aiohttp.ClientSession, gateway: str, ready: asyncio.Event) -> None:
        nonlocal finished
        reader = FrameReader()
        async with session.get(f"{address}{EVENTS_PATH}?gateway={gateway}", headers=headers) as response:
            ready.set()
            async for chunk in response.content.iter_any():
                now = time.monotonic()
                for frame in reader.feed(chunk):
                    parsed = parse_event_id(frame.id)
                    if parsed is not None:
                        arrived.setdefault(parsed[1], now)
                    finished += sum(isinstance(event, Finished) for event in decode_step(frame.data))
                if finished == options.slot_count:
                    return

    sampling = Sampling(temperature=0.0)
    request = GenerateRequest(
        messages=(Message("user", "Tell me a story about a cat."),),
        sampling=sampling,
        max_tokens=options.tokens,
        ignore_eos=True,
    )
    names = [f"g{number}" for number in range(min(options.gateways, options.slot_count))]
    async with aiohttp.ClientSession() as session:
        readies = [asyncio.Event() for _ in names]
        tasks = [
            asyncio.create_task(listen_to(session, name, ready)) for name, ready in zip(names, readies, strict=True)
        ]
        await asyncio.gather(*(ready.wait() for ready in readies))
        for call in range(options.slot_count):
            submit = Submit(gateway=names[call % len(names)], call=call, request=request, tenant="t")
            body = msgspec.json.encode(submit)
            async with session.post(address + SUBMIT_PATH, data=body, headers=headers) as response:
                assert response.status == 202, await response.text()
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return arrived


def summarise(options: argparse.Namespace, ended_at: dict[int, float], arrived: dict[int, float]) -> Result:
    times = [at for step, at in sorted(ended_at.items()) if step > SKIPPED_STEPS]
    steps = [(after - before) * 1e6 for before, after in pairwise(times)]
    deliveries = [(at - ended_at[step]) * 1e6 for step, at in arrived.items() if step in ended_at]
    num_tokens = options.slot_count * options.tokens
    return Result(steps, deliveries, num_tokens / (max(ended_at.values()) - min(ended_at.values())))


def quantile(values: list[float], share: float) -> str:
    return f"{sorted(values)[min(len(values) - 1, int(share * len(values)))]:.0f}" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=300, help="tokens per answer")
    parser.add_argument("--gateways", type=int, default=2, help="event streams that the answers are spread over")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured; the middle one counts")
    parser.add_argument("--role", choices=["table", "service", "engine"], default="table", help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--slot-count", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument(
        "--times", type=Path, default=Path(f"/tmp/engine-steps-{os.getpid()}.json"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.role == "engine":
        return run_piped_engine(options)
    if options.role == "service":
        sys.setswitchinterval(WAYS[options.way])
        return uvloop.run(serve(options))
    print("| slots | engine and loop | step p50, us | step p95, us | tokens/s | delivery p50, us | delivery p99, us |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for slots in options.slots:
        options.slot_count = slots
        for way in WAYS:
            results = [alone(options) if way == "alone" else streamed(options, way) for _ in range(options.rounds)]
            result = sorted(results, key=lambda result: result.tokens_per_s)[len(results) // 2]
            steps, deliveries = result.steps_us, result.deliveries_us
            cells = (quantile(steps, 0.5), quantile(steps, 0.95), f"{result.tokens_per_s:,.0f}")
            late = (quantile(deliveries, 0.5), quantile(deliveries, 0.99))
            print(f"| {options.slot_count} | {way} | {' | '.join((*cells, *late))} |", flush=True)
    options.times.unlink(missing_ok=True)
    return None


if __name__ == "__main__":
    main()
