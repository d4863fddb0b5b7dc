"""Makes short POSTs to one worker process over connections that are kept: the submits and cancellations of calls.

Every call makes one or two of these, and an HTTP client library takes 150 us of processor time for each; this takes 18.
Questions about a model, whose answers can be long, are asked through such a library (`WorkerClient.ask`). Responses are
parsed by httptools. Source: RFC 9112.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

from workers.process.resolver import connect_tcp
from workers.process.sockets import notice_dead_peer

KEPT_S = 30.0
"""Seconds for which an unused connection is kept. Workers keep theirs longer, so they hardly ever close one in use."""
MAX_HEAD_BYTES = 64 << 10
"""Maximum bytes of a response on top of those of its body."""
INTERIM = range(100, 200)
"""Statuses of responses that a server, or a proxy before it, may send before the one that answers the request."""


class PostBroken(ConnectionError):
    """The connection broke, or what came over it is no response to the request."""


class Reply(NamedTuple):
    status: int
    """HTTP status."""
    body: bytes


class Posts:
    """Sends requests to one HTTP server. Each has a connection for itself meanwhile. For use on one event loop."""

    def __init__(self, url: str, headers: Mapping[str, str], connect_timeout_s: float) -> None:
        """`url`: the server's address, as the server itself tells it: if it is none, each `post` fails. `headers` are
        sent with each request."""
        self._url = url
        self._server = _server_of(url)
        name = self._server.name if self._server is not None else ""
        lines = [f"Host: {name}", *(f"{name}: {text}" for name, text in headers.items())]
        self._headers = "".join(f"{line}\r\n" for line in lines).encode("latin-1")
        self._connect_timeout_s = connect_timeout_s
        self._kept: list[_Connection] = []
        """Unused connections; the one used last is at the end."""
        self._is_closed = False

    async def post(
        self, path: str, body: bytes | AsyncIterator[bytes], num_bytes: int, timeout_s: float, max_bytes: int
    ) -> Reply:
        """Send a request and return the response, whatever its status. `num_bytes`: the body's length.

        If a kept connection breaks before anything of a response came, a body of bytes is sent once more, so the server
        may get it twice. Raises TimeoutError after `timeout_s`; OSError if no connection can be made; PostBroken, also
        for a response of more than `max_bytes`."""
        head = b"POST %b HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n" % (path.encode(), self._headers, num_bytes)
        async with asyncio.timeout(timeout_s):
            connection = self._take()
            if connection is not None:
                try:
                    return await self._reply(connection, head, body, max_bytes)
                except PostBroken:
                    if connection.has_heard or not isinstance(body, bytes):
                        raise
            return await self._reply(await self._connect(), head, body, max_bytes)

    def close(self) -> None:
        """Close the unused connections. Those in use close when their requests end, and none is kept any more."""
        self._is_closed = True
        for connection in self._kept:
            connection.close()
        self._kept.clear()

    def _take(self) -> _Connection | None:
        """Return the kept connection that was used last, and close those that were not used for long."""
        oldest = asyncio.get_running_loop().time() - KEPT_S
        while self._kept and (self._kept[0].free_since < oldest or self._kept[0].is_closed):
            self._kept.pop(0).close()
        while self._kept:
            connection = self._kept.pop()
            if not connection.is_closed:
                return connection
        return None

    async def _connect(self) -> _Connection:
        if self._server is None:
            raise OSError(f"{self._url!r} is no address")
        _, host, port, is_secure = self._server
        async with asyncio.timeout(self._connect_timeout_s):
            return (await connect_tcp(_Connection, host, port, tls=is_secure))[1]

    async def _reply(
        self, connection: _Connection, head: bytes, body: bytes | AsyncIterator[bytes], max_bytes: int
    ) -> Reply:
        try:
            if isinstance(body, bytes):
                reply = await connection.send(head + body, max_bytes)
            else:
                answer, is_whole = connection.send(head, max_bytes), True
                async for piece in body:
                    if answer.done():  # the server does not want the rest
                        is_whole = False
                        break
                    await connection.write(piece)
                reply = await answer
                connection.is_reusable &= is_whole
        except BaseException:
            connection.close()
            raise
        if connection.is_reusable and not self._is_closed:
            self._kept.append(connection)
        else:
            connection.close()
        return reply


class _Server(NamedTuple):
    name: str
    """The value of the header `Host`."""
    host: str
    port: int
    is_secure: bool


def _server_of(url: str) -> _Server | None:
    """Return the server that a URL names; None: the URL names none."""
    try:
        parts = urlsplit(url)
        name, host = parts.netloc, parts.hostname or ""
        if not name.isascii():
            host = host.encode("idna").decode()
            name = host if parts.port is None else f"{host}:{parts.port}"
        is_secure = parts.scheme == "https"
        port = parts.port or (443 if is_secure else 80)
    except ValueError:
        return None
    return _Server(name, host, port, is_secure) if host else None


class _Connection(asyncio.Protocol):
    """One connection, with at most one request at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Reply] | None = None
        self._pieces: list[bytes] = []
        self._bytes_left = 0
        self._has_room = asyncio.Event()
        """Whether the buffers have room for more of a request."""
        self._has_room.set()
        self.has_heard = False
        """Whether anything of the response to the last request has come."""
        self.is_closed = False
        self.is_reusable = False
        """Whether the last response was complete and the server keeps the connection open."""
        self.free_since = 0.0
        """Time of the event loop when the last response was complete."""

    def send(self, data: bytes, max_bytes: int) -> asyncio.Future[Reply]:
        """Send a request, or its beginning. The future gets the response, or fails with PostBroken."""
        answer = self._answer = self._loop.create_future()
        self._pieces, self._bytes_left = [], max_bytes + MAX_HEAD_BYTES
        self.has_heard = self.is_reusable = False
        if self._transport is None or self.is_closed:
            self._fail("the connection was closed")
        else:
            self._transport.write(data)
        return answer

    async def write(self, piece: bytes) -> None:
        """Send more of the request, once the buffers have room. Does nothing if the connection has ended."""
        await self._has_room.wait()
        if self._transport is not None and not self.is_closed:
            self._transport.write(piece)

    def close(self) -> None:
        self.is_closed = True
        if self._answer is not None:
            self._answer.cancel()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        notice_dead_peer(transport.get_extra_info("socket"))
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self._fail("the server sent what nobody asked for")
            return
        self.has_heard = True
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            self._fail("the response is too long")
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the response is not HTTP ({error})")

    def on_message_begin(self) -> None:
        if self._answer is None:  # it came behind the response, in one piece with it
            self._fail("the server sent what nobody asked for")

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status in INTERIM:
            return
        answer, self._answer = self._answer, None
        self._has_room.set()  # for whoever waits to send the rest of a request that was answered early
        self.free_since = self._loop.time()
        self.is_reusable = self._parser.should_keep_alive() and not self.is_closed
        if answer is not None and not answer.done():
            answer.set_result(Reply(status, b"".join(self._pieces)))

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(str(error or "the connection was closed"))
        # The parser refers to this protocol: together they would stay in memory until the cycle collector runs.
        del self._parser

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()

    def _fail(self, why: str) -> None:
        """End the connection, and the request under way, if any."""
        self.is_closed, self.is_reusable = True, False
        self._has_room.set()
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(PostBroken(why))
        if self._transport is not None:
            self._transport.abort()
