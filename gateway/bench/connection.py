"""Sends calls to the server (HTTP/1.1 on asyncio protocols, with keep-alive), and records each call on a tape.

A client library would need several times the CPU time, and the run would measure the load generator, not the server.

Sources: OpenAI's API reference, "Chat completion chunk"; llama-server's `timings`; docs/api.md, "Headers".
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from array import array
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec
from msgspec import Struct

UNFINISHED = "unfinished"
"""Value of `Tape.error` for a call that was still running when the run was ended."""


def _no_times() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Tape:
    """The record of one call. Times are time.perf_counter(). `due`: when the call should have been sent; waits count
    from then."""

    due: float
    team: str = ""
    sent: float = 0.0
    ended: float = 0.0
    times: array[float] = field(default_factory=_no_times)
    """The times at which the pieces of the answer came, one for each."""
    tokens: int = 0
    """Tokens of the answer as the server reports them; the number of pieces if it reports none."""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    error: str = ""
    """Kind of the error, one of those listed at `Reading`; empty: no error."""
    detail: str = ""
    position: int | None = None
    """First position in the server's queue; 0: the call did not wait; None: the server did not report it."""
    wait_s: float | None = None
    """The first wait in seconds that the server predicted; None: it predicted none."""

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.due

    @property
    def e2e_s(self) -> float:
        return self.ended - self.due

    @property
    def tpot_s(self) -> float:
        """Mean seconds per token after the first; 0 if there was only one."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def late_s(self) -> float:
        """Seconds by which the load generator sent the call too late."""
        return max(0.0, self.sent - self.due)

    @property
    def good(self) -> bool:
        return not self.error and bool(self.ended)

    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


DETAIL_CHARS = 300
_WAITING = re.compile(rb"waiting position=(\d+)(?: wait_s=([\d.]+))?")
_LAST_WORD = b"data: [DONE]"


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _PromptDetails(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Timings(Struct):
    cache_n: int | None = None


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Reading:
    """Parses one answer as it comes, and records it on the call's tape. `said`: the pieces of text so far.

    Kinds of errors (`Tape.error`): `http_<status>`, `in_stream` (an error after the stream had begun), `cut` (the
    stream ended without `[DONE]`), `empty` (a complete stream without text), `unreadable`, `timeout`, `connection`."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.said: list[str] = []
        self._status = 0
        self._streams = False
        self._rest = b""
        self._whole = False

    def begin(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status
        self._streams = status == 200 and headers.get(b"content-type", b"").startswith(b"text/event-stream")
        if (position := headers.get(b"x-queue-position", b"")).isdigit():
            self.tape.position = int(position)

    def feed(self, data: bytes, now: float) -> None:
        rest = self._rest + data if self._rest else data
        if not self._streams:
            self._rest = rest
            return
        if b"\r" in rest:
            rest = rest.replace(b"\r\n", b"\n")
        *events, self._rest = rest.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {") and b"\n" not in event:
                self._chunk(event[6:], now)
            else:
                self._lines(event, now)

    def finish(self, now: float) -> None:
        """Record that the HTTP response has ended, and an error if the answer is not complete."""
        if self._streams and self._rest:
            self._lines(self._rest, now)
        tape = self.tape
        tape.ended = now
        tape.tokens = tape.tokens or len(tape.times)
        if tape.error:
            return
        if self._status != 200:
            self.fail(f"http_{self._status}", self._rest.decode("utf-8", "replace"))
        elif not self._streams:
            self.fail("unreadable", "the answer is no stream of events: " + self._rest.decode("utf-8", "replace"))
        elif not self._whole:
            self.fail("cut", "the stream ended before its last word")
        elif not tape.times:
            self.fail("empty", "the answer has no text")

    def fail(self, kind: str, detail: str) -> None:
        """Record an error, unless one is recorded already."""
        if not self.tape.error:
            self.tape.error, self.tape.detail = kind, " ".join(detail.split())[:DETAIL_CHARS]

    def _lines(self, event: bytes, now: float) -> None:
        for line in event.split(b"\n"):
            if line.startswith(_LAST_WORD) or line == b"data:[DONE]":
                self._whole = True
            elif line.startswith(b"data:"):
                self._chunk(line[5:], now)
            elif line.startswith(b":") and self.tape.wait_s is None and (told := _WAITING.search(line)):
                self.tape.wait_s = float(told[2]) if told[2] else None  # the server can't predict it without a worker
                if self.tape.position is None:
                    self.tape.position = int(told[1])

    def _chunk(self, document: bytes, now: float) -> None:
        try:
            chunk = _decode(document)
        except msgspec.MsgspecError as error:
            self.fail("unreadable", f"{error}: {document[:100].decode('utf-8', 'replace')}")
            return
        for choice in chunk.choices:
            self._piece(choice.delta, now)
        if chunk.usage is not None:
            self._usage(chunk.usage)
        if chunk.timings is not None and self.tape.cached_tokens is None:
            self.tape.cached_tokens = chunk.timings.cache_n
        if chunk.error is not None:
            self.fail("in_stream", msgspec.json.encode(chunk.error).decode())

    def _piece(self, delta: _Delta, now: float) -> None:
        if delta.content:
            self.said.append(delta.content)
        elif not (delta.reasoning_content or delta.reasoning or delta.tool_calls):
            return
        self.tape.times.append(now)

    def _usage(self, usage: _Usage) -> None:
        tape = self.tape
        tape.tokens, tape.prompt_tokens = usage.completion_tokens, usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            tape.cached_tokens = usage.prompt_tokens_details.cached_tokens


CONNECT_TIMEOUT_S = 30.0
CHAT_PATH = "/v1/chat/completions"


class Dropped(ConnectionError):
    """The server closed the connection before the answer had ended."""


@dataclass(frozen=True, slots=True)
class Target:
    """The address that calls are sent to. `origin`: scheme, host and port, so without secrets."""

    origin: str
    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None

    def request(self, body: bytes, key: str) -> bytes:
        bearer = f"Authorization: Bearer {key}\r\n" if key else ""
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{bearer}Accept: text/event-stream\r\n"
            f"User-Agent: paddock-bench\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def target(url: str, *, insecure: bool) -> Target:
    """Return the target for a base URL, given with or without `/v1`. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{parts.scheme}://{parts.hostname or ''} is no http or https address")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    if tls is not None and insecure:
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/").removesuffix("/v1") + CHAT_PATH
    return Target(f"{parts.scheme}://{host}:{port}", parts.hostname, port, path, tls)


class Connections:
    """A pool of connections, one for each call that runs. The most recently used idle connection is used next."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: list[_Connection] = []

    async def exchange(self, request: bytes, reading: Reading) -> None:
        """Send a request, and return when the answer has ended. Raises OSError; TimeoutError if connecting takes too
        long."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.open:
                continue
            try:
                await self._ask(connection, request, reading)
                return
            except Dropped:
                # A server can close an idle connection while it is used again; a new one shows whether it is up.
                if connection.began:
                    raise
        await self._ask(await self._open(), request, reading)

    async def _open(self) -> _Connection:
        there = self._target
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(_Connection, there.host, there.port, ssl=there.tls)
        return connection

    async def _ask(self, connection: _Connection, request: bytes, reading: Reading) -> None:
        try:
            await connection.ask(request, reading)
        finally:
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


class _Connection(asyncio.Protocol):
    """A connection to the server, which carries one call at a time."""

    def __init__(self) -> None:
        self.began = False
        """Whether a part of the answer has come."""
        self.reusable = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._reading: Reading | None = None
        self._over: asyncio.Future[None] | None = None
        self._now = 0.0

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, reading: Reading) -> None:
        """Send a request, and return when the answer has ended. Raises Dropped."""
        if self._transport is None:
            raise Dropped("the connection was not made")
        self.began = self.reusable = False
        self._headers, self._reading = {}, reading
        self._over = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._over

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self.began = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._settle(Dropped(f"what came is no HTTP: {error}"))
            self.close()

    def eof_received(self) -> None:
        # An answer without a length ends with the connection.
        if self._reading is not None and self._headers and not self._framed():
            self.on_message_complete()

    def connection_lost(self, error: Exception | None) -> None:
        self._settle(Dropped(str(error or "the server closed the connection")))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._reading is not None:
            self._reading.begin(self._parser.get_status_code(), self._headers)

    def on_body(self, data: bytes) -> None:
        if self._reading is not None:
            self._reading.feed(data, self._now)

    def on_message_complete(self) -> None:
        if self._reading is None:
            return
        self._reading.finish(self._now)
        self.reusable = self.open and self._framed() and self._parser.should_keep_alive()
        self._settle(None)

    def _framed(self) -> bool:
        return b"content-length" in self._headers or b"transfer-encoding" in self._headers

    def _settle(self, error: Exception | None) -> None:
        over, self._over, self._reading = self._over, None, None
        if over is None or over.done():
            return
        if error is None:
            over.set_result(None)
        else:
            over.set_exception(error)
