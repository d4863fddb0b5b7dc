"""Several callers at the same moment, against the Python server that llama-cpp-python brings."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from benchmarks.engine.bench import Bench
from benchmarks.engine.calls import Answer, Call, Samples, Unmeasured, ttft_p50_s
from benchmarks.engine.servers import (
    COMPUTE_CORE,
    ENDLESS,
    Client,
    Serve,
    Shape,
    at_once,
    connections,
    paddock,
    reached,
    reference,
    until_healthy,
)
from benchmarks.reference import python_server
from benchmarks.table import Row
from tests.support.stack import Stack, free_port
from workers.protocol.framing import FrameReader

SHAPE = Shape(slots=8, ctx=512)
CALLERS, NUM_PREDICT = 8, 96
BAR = 1 / 20
SUBJECTS = ("Rain", "Bread", "Maps", "Clocks", "Rivers", "Chess", "Salt", "Kites")
"""Prompts differ from their first word on, and are a few tokens long: what is compared is how long callers wait for
each other. Every token more costs all servers alike, and on one core 100 of them are half a second."""

_SOME_TEXT = re.compile(rb'"text": ?"[^"]')


class PythonServerClient:
    """`/v1/completions` takes no tokens, only text."""

    def __init__(self, session: aiohttp.ClientSession, url: str, pid: int) -> None:
        self.pid = pid
        self._session = session
        self._url = url

    async def ask(self, call: Call, answer: Answer) -> None:
        body = {"prompt": call.prompt, "max_tokens": call.num_predict, "temperature": 0, "stream": True}
        answer.sent = time.perf_counter()
        url = f"{self._url}/v1/completions"
        with reached("llama_cpp.server"):
            await self._read(url, body, answer)
        if not answer.ended:
            raise Unmeasured("llama_cpp.server ended an answer half-way")

    async def _read(self, url: str, body: Mapping[str, object], answer: Answer) -> None:
        reader = FrameReader()
        async with self._session.post(url, json=body, timeout=ENDLESS) as response:
            if response.status != 200:
                raise Unmeasured(f"llama_cpp.server answered {response.status}: {(await response.text())[:300]}")
            async for data in response.content.iter_any():
                now = time.perf_counter()
                for frame in reader.feed(data):
                    if _SOME_TEXT.search(frame.data):
                        answer.note(now, 1)
                    if frame.data.strip() == b"[DONE]":
                        answer.ended = now


@asynccontextmanager
async def serve_python(stack: Stack, model: Path, shape: Shape) -> AsyncIterator[Client]:
    """Its own defaults, but for one: a new request must not interrupt the answer that is being written."""
    port = free_port()
    command = ["taskset", "-c", COMPUTE_CORE, str(python_server()), "-m", "llama_cpp.server", "--model", str(model)]
    command += ["--n_threads", "1", "--n_threads_batch", "1", "--n_ctx", str(shape.ctx), "--port", str(port)]
    process = stack.spawn(f"python-server-{port}", [*command, "--interrupt_requests", "false"])
    async with aiohttp.ClientSession(connector=connections()) as session:
        await until_healthy(session, f"http://127.0.0.1:{port}/v1/models", process)
        yield PythonServerClient(session, f"http://127.0.0.1:{port}", process.pid)
    process.stop()


def calls(label: str) -> list[Call]:
    return [Call(f"{subject} {label}?", NUM_PREDICT) for subject in SUBJECTS[:CALLERS]]


async def measure(bench: Bench) -> list[Row]:
    sides: dict[str, Serve] = {"Paddock": paddock(), "llama_cpp.server": serve_python, "llama-server": reference()}
    waits = {side: Samples() for side in sides}
    for number in range(bench.rounds(2)):
        for side, serve in sides.items():
            async with serve(bench.stack, bench.big.path, SHAPE) as client:
                await at_once(client, [Call("Hello there", 4)])
                answers = await at_once(client, calls(f"{number}"))
            waits[side].add(ttft_p50_s(answers))
            bench.say(f"{CALLERS} callers at once, {side}: TTFT p50 {waits[side].values[-1]:.2f} s")
    ours, theirs = waits["Paddock"], waits["llama_cpp.server"]
    ratio = ours.median / theirs.median
    what = f"{CALLERS} callers at once, {NUM_PREDICT} tokens each, {bench.big.name}: TTFT p50"
    aside = ours.median / waits["llama-server"].median
    return [
        Row(
            f"{what}, against llama_cpp.server",
            f"{ours.text(2)} against {theirs.text(2)} s",
            f"1/{1 / ratio:.0f}",
            "<= 1/20",
            ratio <= BAR,
        ),
        Row(
            f"{what}, against llama-server",
            f"{ours.text(2)} against {waits['llama-server'].text(2)} s",
            f"{aside:.2f} x",
            "",
            True,
        ),
    ]
