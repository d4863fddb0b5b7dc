"""Connections to the server: HTTP/1.1 on asyncio protocols, kept open between calls.

A client library would cost several times as much: the run must not measure the generator.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from gateway.bench.reading import Reading

CONNECT_TIMEOUT_S = 30.0
CHAT_PATH = "/v1/chat/completions"


class Dropped(ConnectionError):
    """The server closed the connection before the answer was over."""


@dataclass(frozen=True, slots=True)
class Target:
    """The address that calls go to. `origin`: scheme, host and port, without anything secret."""

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
    """Return the target of a `url` with or without `/v1`. Raises ValueError."""
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
    """The pool of connections, as many as calls run at once; the last used one is used next."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: list[_Connection] = []

    async def exchange(self, request: bytes, reading: Reading) -> None:
        """Send a request and return when the answer is over. Raises OSError, TimeoutError for the connection alone."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.open:
                continue
            try:
                await self._asked(connection, request, reading)
                return
            except Dropped:
                # A server may close an idle connection just as it is used again; a fresh one shows whether it is up.
                if connection.began:
                    raise
        await self._asked(await self._opened(), request, reading)

    async def _opened(self) -> _Connection:
        there = self._target
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(_Connection, there.host, there.port, ssl=there.tls)
        return connection

    async def _asked(self, connection: _Connection, request: bytes, reading: Reading) -> None:
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
    """One connection, for one call at a time."""

    def __init__(self) -> None:
        self.began = False
        """Whether some of the answer has come."""
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
        """Send a request and return when the answer is over. Raises Dropped."""
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
        # An answer without a length ends here.
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
