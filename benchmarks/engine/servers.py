"""The two that are compared, as real processes on the computing core, and how each is spoken to.

Paddock is a worker process alone, asked over the worker protocol; llama-server is asked over its own `/completion`.
Both get the same file, slots and context per slot, and one thread. The load runs in this process, on the other core.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec

from benchmarks.engine.calls import Answer, Call, Unmeasured
from benchmarks.reference import llama_server
from tests.support.stack import Process, Stack, free_port
from tests.support.worker_access import access_headers_of
from workers.protocol.events import Failed, Finished, Started, Text, decode_step
from workers.protocol.framing import CANCEL_PATH, EVENTS_PATH, SUBMIT_PATH, FrameReader
from workers.protocol.requests import Cancel, GenerateRequest, Sampling, Submit

COMPUTE_CORE, LOAD_CORE = "0", "1"
STARTUP_S = 120.0
GREEDY = Sampling(temperature=0)
ENDLESS = aiohttp.ClientTimeout(total=None)
TENANT = "benchmark"

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Shape:
    slots: int
    ctx: int
    """Tokens per slot."""

    @property
    def kv_tokens(self) -> int:
        return self.slots * self.ctx


class Client(Protocol):
    """A running server."""

    @property
    def pid(self) -> int:
        """The one process that computes."""

    async def ask(self, call: Call, answer: Answer) -> None:
        """Fills the answer until it ends. Cancelled, it ends the call on the server too. Raises Unmeasured."""


Serve = Callable[[Stack, Path, Shape], AbstractAsyncContextManager[Client]]
"""Starts a server, stops it at the end."""


@contextmanager
def reached(name: str) -> Iterator[None]:
    """A server that can't be spoken to is one without a figure. Raises Unmeasured."""
    try:
        yield
    except (aiohttp.ClientError, OSError) as error:
        raise Unmeasured(f"{name} broke a connection: {type(error).__name__}: {error}") from error


def connections() -> aiohttp.TCPConnector:
    """A connection for each call: servers differ in when they close one that is kept."""
    return aiohttp.TCPConnector(limit=0, force_close=True)


class PaddockClient:
    """One gateway's place towards one worker: a stream of events, calls by number."""

    def __init__(self, session: aiohttp.ClientSession, url: str, pid: int) -> None:
        self.pid = pid
        self._session = session
        self._url = url
        self._gateway = f"bench-{os.getpid()}"
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[Answer, asyncio.Future[None]]] = {}

    async def listen(self, opened: asyncio.Event) -> None:
        """Reads the worker's events until cancelled, or until the worker goes away."""
        reader = FrameReader()
        url = f"{self._url}{EVENTS_PATH}?gateway={self._gateway}"
        with suppress(aiohttp.ClientError):
            async with self._session.get(url, timeout=ENDLESS) as response:
                opened.set()
                async for data in response.content.iter_any():
                    now = time.perf_counter()
                    for frame in reader.feed(data):
                        if not frame.event:
                            self._take(frame.data, now)
        for _, ended in self._open.values():
            if not ended.done():
                ended.set_exception(Unmeasured("the worker went away"))

    def _take(self, data: bytes, now: float) -> None:
        for event in decode_step(data):
            if event.call not in self._open:
                continue
            answer, ended = self._open[event.call]
            match event:
                case Text():
                    answer.note(now, event.num_tokens)
                case Started():
                    answer.num_prompt, answer.num_cached = event.num_prompt_tokens, event.num_cached_tokens
                case Finished():
                    answer.ended = now
                    ended.set_result(None)
                case Failed():
                    ended.set_exception(Unmeasured(f"Paddock failed a call: {event.failure.message}"))
                case _:
                    pass

    async def ask(self, call: Call, answer: Answer) -> None:
        number = next(self._numbers)
        request = GenerateRequest(prompt=call.prompt, max_tokens=call.num_predict, ignore_eos=True, sampling=GREEDY)
        submit = Submit(gateway=self._gateway, call=number, request=request, tenant=TENANT)
        ended = asyncio.get_running_loop().create_future()
        self._open[number] = (answer, ended)
        answer.sent = time.perf_counter()
        try:
            await self._post(SUBMIT_PATH, submit, 202)
            await ended
        except asyncio.CancelledError:
            await self._post(CANCEL_PATH, Cancel(self._gateway, (number,)), 204)
            raise
        finally:
            del self._open[number]

    async def _post(self, path: str, message: Submit | Cancel, expected: int) -> None:
        with reached("Paddock"):
            async with self._session.post(self._url + path, data=_encode(message)) as response:
                body = await response.text()
                if response.status != expected:
                    raise Unmeasured(f"Paddock answered {response.status}: {body[:300]}")


class Timings(msgspec.Struct, frozen=True):
    cache_n: int = 0
    prompt_n: int = 0


class CompletionChunk(msgspec.Struct, frozen=True):
    """What is read of one event of llama-server's `/completion`; source: tools/server/README.md of llama.cpp."""

    content: str = ""
    tokens: tuple[int, ...] = ()
    stop: bool = False
    timings: Timings = Timings()


_decode_chunk = msgspec.json.Decoder(CompletionChunk).decode


class LlamaServerClient:
    def __init__(self, session: aiohttp.ClientSession, url: str, pid: int) -> None:
        self.pid = pid
        self._session = session
        self._url = url

    async def ask(self, call: Call, answer: Answer) -> None:
        body = {
            "prompt": call.prompt,
            "n_predict": call.num_predict,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": True,
            "return_tokens": True,
            "stream": True,
        }
        reader = FrameReader()
        answer.sent = time.perf_counter()
        url = f"{self._url}/completion"
        with reached("llama-server"):
            async with self._session.post(url, data=_encode(body), timeout=ENDLESS) as response:
                if response.status != 200:
                    raise Unmeasured(f"llama-server answered {response.status}: {(await response.text())[:300]}")
                async for data in response.content.iter_any():
                    now = time.perf_counter()
                    for frame in reader.feed(data):
                        self._take(frame.data, answer, now)
        if not answer.ended:
            raise Unmeasured("llama-server ended an answer half-way")

    @staticmethod
    def _take(data: bytes, answer: Answer, now: float) -> None:
        chunk = _decode_chunk(data)
        if chunk.content or chunk.tokens:
            answer.note(now, max(1, len(chunk.tokens)))
        if chunk.stop:
            answer.ended = now
            answer.num_cached = chunk.timings.cache_n
            answer.num_prompt = chunk.timings.cache_n + chunk.timings.prompt_n


def paddock(**settings: Any) -> Serve:
    """Our worker with these settings beside model, slots and context."""

    @asynccontextmanager
    async def serve(stack: Stack, model: Path, shape: Shape) -> AsyncIterator[Client]:
        process = stack.worker(
            model,
            "bench",
            worker_id=f"worker-{free_port()}",
            slots=shape.slots,
            ctx=shape.ctx,
            kv_tokens=shape.kv_tokens,
            log_level="warning",
            **settings,
        )
        headers = {**access_headers_of(process.url, stack.secret), "Content-Type": "application/json"}
        async with aiohttp.ClientSession(headers=headers, connector=connections()) as session:
            client, opened = PaddockClient(session, process.url, process.pid), asyncio.Event()
            async with asyncio.TaskGroup() as group:
                listener = group.create_task(client.listen(opened))
                await opened.wait()
                yield client
                listener.cancel()
        process.stop()

    return serve


def reference(*flags: str) -> Serve:
    """llama-server with its defaults and these flags."""

    @asynccontextmanager
    async def serve(stack: Stack, model: Path, shape: Shape) -> AsyncIterator[Client]:
        port = free_port()
        given = ["-m", str(model), "-t", "1", "-tb", "1", "-c", str(shape.kv_tokens), "-np", str(shape.slots), *flags]
        command = ["taskset", "-c", COMPUTE_CORE, str(llama_server()), *given, "--host", "127.0.0.1"]
        process = stack.spawn(f"llama-server-{port}", [*command, "--port", str(port)])
        async with aiohttp.ClientSession(connector=connections()) as session:
            await until_healthy(session, f"http://127.0.0.1:{port}/health", process)
            yield LlamaServerClient(session, f"http://127.0.0.1:{port}", process.pid)
        process.stop()

    return serve


async def until_healthy(session: aiohttp.ClientSession, url: str, process: Process) -> None:
    """Raises Unmeasured when the server ends instead, or takes longer than `STARTUP_S`."""
    deadline = time.monotonic() + STARTUP_S
    while time.monotonic() < deadline and process.popen.poll() is None:
        with suppress(aiohttp.ClientError, OSError):
            async with session.get(url) as response:
                if response.status == 200:
                    return
        await asyncio.sleep(0.05)
    raise Unmeasured(f"{process.name} did not start: {process.text()[-1000:]}")


async def at_once(client: Client, calls: list[Call]) -> list[Answer]:
    """All calls together, each by a caller of its own."""
    answers = [Answer() for _ in calls]
    async with asyncio.TaskGroup() as group:
        for call, answer in zip(calls, answers, strict=True):
            group.create_task(client.ask(call, answer))
    return answers


async def in_order(client: Client, calls: list[Call], callers: int) -> list[Answer]:
    """Calls in the order given, so many at once."""
    answers = [Answer() for _ in calls]
    pending = iter(zip(calls, answers, strict=True))

    async def caller() -> None:
        for call, answer in pending:
            await client.ask(call, answer)

    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(caller())
    return answers
