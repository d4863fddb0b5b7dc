"""A worker that says exactly what a test tells it to, over real sockets, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from tests.support.pool import call
from workers.protocol.control import CHALLENGE_HEADER, PROOF_HEADER, proof
from workers.protocol.events import HTTP_STATUS, CallEvent, Failure, encode_alive, encode_step
from workers.protocol.framing import ALIVE_EVENT, CANCEL_PATH, EVENTS_PATH, SUBMIT_PATH, encode_frame, event_id
from workers.protocol.heartbeat import Heartbeat, ModelFacts, WorkerAddress
from workers.protocol.queries import TEAM_HEADER
from workers.protocol.requests import Accepted, Cancel, Submit

CALL = call()
"""The call that the tests submit, unless it matters."""


@dataclass(slots=True)
class ScriptedWorker:
    """`say` and `drop` act on the newest event stream."""

    boot: str = "boot1"
    refusal: Failure | None = None
    """Answer to every submit."""
    acceptance: bytes = b""
    """In place of the right answer to a submit that is not refused."""
    stream_status: int = 200
    secret: str = "secret"
    """What it proves to know."""
    redirects_to: str = ""
    """Where it sends whoever asks for anything but events."""
    reply_bytes: int = 0
    """In place of every answer: so many bytes."""
    num_sent: int = 0
    """Of them, as far as they were taken."""
    cancel_delay_s: float = 0.0
    reply: bytes = b""
    """Answer to whatever else is asked."""
    replies: dict[str, bytes] = field(default_factory=dict)
    """By method, where one has its own answer."""
    reply_delay_s: float = 0.0
    asked: list[str] = field(default_factory=list)
    """Bodies of these."""
    asks: list[tuple[str, str]] = field(default_factory=list)
    """Their methods and paths."""
    teams: list[str | None] = field(default_factory=list)
    """Their `TEAM_HEADER`."""
    submits: list[Submit] = field(default_factory=list)
    cancels: list[tuple[int, ...]] = field(default_factory=list)
    resumed_from: list[str] = field(default_factory=list)
    """`Last-Event-ID` of each event stream, empty where there was none."""
    secrets: set[str] = field(default_factory=set)
    port: int = 0
    _step: int = 0
    _stream: web.StreamResponse | None = None
    _request: web.Request | None = None
    _over: asyncio.Event = field(default_factory=asyncio.Event)
    _runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def at(self) -> WorkerAddress:
        return self.heartbeat().at

    def heartbeat(self, boot: str = "") -> Heartbeat:
        facts = ModelFacts(n_ctx_train=1, n_params=1, size=1, n_vocab=1)
        return Heartbeat(
            worker="w1",
            boot=boot or self.boot,
            model="m",
            address=self.address,
            slots=4,
            slots_busy=0,
            n_ctx=64,
            kv_tokens=256,
            kv_tokens_used=0,
            facts=facts,
        )

    async def start(self) -> None:
        app = web.Application()
        app.add_routes([web.get(EVENTS_PATH, self._events)])
        app.add_routes([web.post(SUBMIT_PATH, self._submit), web.post(CANCEL_PATH, self._cancel)])
        app.add_routes([web.route("*", "/{path:.*}", self._reply)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """As when the process dies: connections end, then nobody listens."""
        self.drop()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def say(self, *steps: list[CallEvent]) -> None:
        """One frame per step, all in one write."""
        frames = []
        for events in steps:
            self._step += 1
            frames.append(encode_frame(encode_step(events), event_id(self.boot, self._step)))
        await self._write(b"".join(frames))

    async def say_alive(self, calls: list[int]) -> None:
        await self._write(encode_frame(encode_alive(calls), event_id(self.boot, self._step), ALIVE_EVENT))

    async def write(self, data: bytes) -> None:
        await self._write(data)

    @contextmanager
    def flooding(self, frame: bytes) -> Iterator[None]:
        """Write the frame again and again, from a thread that hardly needs the interpreter. Say nothing after it."""
        assert self._request is not None
        assert self._request.transport is not None
        chunk = b"%x\r\n%s\r\n" % (len(frame), frame)
        over = threading.Event()

        def flood() -> None:
            with contextlib.suppress(OSError):
                while not over.is_set():
                    writer.sendall(chunk)

        with socket.socket(fileno=os.dup(self._request.transport.get_extra_info("socket").fileno())) as writer:
            writer.settimeout(0.5)
            thread = threading.Thread(target=flood)
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()

    def drop(self) -> None:
        """Aborts the event stream's connection."""
        request, self._request, self._stream = self._request, None, None
        if request is not None and request.transport is not None:
            request.transport.abort()
        self._over.set()

    async def connected(self, count: int = 1) -> None:
        """Waits for the count-th event stream."""
        async with asyncio.timeout(3):
            while len(self.resumed_from) < count or self._stream is None:  # noqa: ASYNC110 - a test may poll
                await asyncio.sleep(0.005)

    async def submitted(self, count: int) -> list[int]:
        """Waits for so many submits; their call numbers."""
        async with asyncio.timeout(3):
            while len(self.submits) < count:  # noqa: ASYNC110 - a test may poll
                await asyncio.sleep(0.005)
        return [submit.call for submit in self.submits]

    async def _write(self, data: bytes) -> None:
        assert self._stream is not None
        await self._stream.write(data)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self.stream_status != 200:
            return web.Response(status=self.stream_status, text="no")
        shown = proof(self.secret, "w1", self.boot, request.headers.get(CHALLENGE_HEADER, ""))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", PROOF_HEADER: shown})
        await response.prepare(request)
        self._over = over = asyncio.Event()
        self._stream, self._request = response, request
        self.secrets.add(request.headers.get("Authorization", ""))
        self.resumed_from.append(request.headers.get("Last-Event-ID", ""))
        await over.wait()
        return response

    async def _submit(self, request: web.Request) -> Any:
        self.submits.append(msgspec.json.decode(await request.read(), type=Submit))
        self.secrets.add(request.headers.get("Authorization", ""))
        if self.redirects_to or self.reply_bytes:
            return await self._misbehaved(request)
        if self.refusal is not None:
            return web.Response(status=HTTP_STATUS[self.refusal.code], body=msgspec.json.encode(self.refusal))
        return web.Response(status=202, body=self.acceptance or msgspec.json.encode(Accepted(self.boot, 3)))

    async def _misbehaved(self, request: web.Request) -> Any:
        if self.redirects_to:
            return web.Response(status=307, headers={"Location": self.redirects_to + request.path})
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(OSError):
            while self.num_sent < self.reply_bytes:
                await response.write(b" " * (1 << 20))
                self.num_sent += 1 << 20
        return response

    async def _cancel(self, request: web.Request) -> web.Response:
        calls = msgspec.json.decode(await request.read(), type=Cancel).calls
        self.cancels.append(calls)
        await asyncio.sleep(self.cancel_delay_s)
        return web.Response(status=204)

    async def _reply(self, request: web.Request) -> Any:
        self.asks.append((request.method, request.path_qs))
        self.teams.append(request.headers.get(TEAM_HEADER))
        self.asked.append(await request.text())
        await asyncio.sleep(self.reply_delay_s)
        if self.redirects_to or self.reply_bytes:
            return await self._misbehaved(request)
        return web.Response(body=self.replies.get(request.method, self.reply))


@asynccontextmanager
async def scripted_worker(**options: object) -> AsyncIterator[ScriptedWorker]:
    worker = ScriptedWorker(**options)  # type: ignore[arg-type]
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()
