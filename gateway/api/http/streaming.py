"""Writes a response of server-sent events as raw ASGI messages. This code runs once per token.

Source: WHATWG HTML, "Server-sent events"; a line that starts with a colon is a comment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from starlette.types import Scope, Send

from workers.http_server.connection import CHUNK

END = b"\n\n"
"""The end of an event. Each event is sent as one chunk of the response: some clients take a chunk for an event."""

UNREAD_BYTES = 64 << 10
"""Bytes of an answer that the server buffers. A send that exceeds this returns at once; uvicorn delays the next one."""

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"

Headers = list[tuple[bytes, bytes]]
ResultT = TypeVar("ResultT")

STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class LongEvent:
    """A long event, which repeats the content of earlier events."""

    parts: Iterator[bytes]
    """The whole event; each part is made when it is to be sent."""
    brief: Iterator[bytes]
    """A short form, for readers that need the event in one piece: it repeats earlier content only if that is short."""


Written = bytes | list[bytes | LongEvent]
"""Whole events, as bytes; if some are long, as a list in which each long event is an item of its own."""


class Pings(NamedTuple):
    """The settings of the pings that keep a stream alive while there is nothing else to send."""

    interval_s: float
    as_events: bool = False
    """Whether pings are events of the stream's dialect; if not, comments, which some clients take for events."""


WriteChunk = Callable[[bytes], bool]
"""Writes a chunk of a response's body at once. Returns False if it can't, having written nothing."""


def chunk_writer_of(scope: Scope) -> WriteChunk:
    """Return the server's own way of writing a chunk (`workers.http_server.connection.CHUNK`), for responses whose
    `send` is the server's. Without one, each chunk goes through `send`."""
    extension = (scope.get("extensions") or {}).get(CHUNK)
    return _write_none if extension is None else extension["write"]


def _write_none(body: bytes) -> bool:
    return False


class EventStream:
    """One streamed response. It starts with its first event, or earlier with a ping if the caller has to wait."""

    __slots__ = ("_chunk", "_head", "_headers", "_ping", "_quiet", "_send", "_whole", "started")

    def __init__(
        self,
        send: Send,
        headers: Callable[[], Headers],
        ping: Callable[[], bytes] = lambda: PING,
        chunk: WriteChunk = _write_none,
    ) -> None:
        """`headers` is called once, at the start, for the headers known by then; `ping` for each ping to send. `chunk`
        writes what need not wait; `send` the rest."""
        self.started = False
        self._chunk = chunk
        self._send = send
        self._headers = headers
        self._ping = ping
        self._quiet = True
        self._head = asyncio.Lock()
        """Held while the head is sent: nothing goes before it, also where a slow client delays it."""
        self._whole = asyncio.Lock()
        """Held while a ping or an event of several parts is sent: a slow client delays both, and they must not mix."""

    async def start(self) -> None:
        """Send status 200 and the headers, unless they were sent before."""
        async with self._head:
            if not self.started:
                headers = STREAM_HEADERS + self._headers()
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
                self.started = True

    def write(self, body: Written) -> Awaitable[None] | None:
        """Write whole events, after `start` and before `end`. Return None if they are written; otherwise what to await,
        which writes them and waits while the client's buffers are full."""
        self._quiet = False
        if isinstance(body, list):
            return self._write_long(body)
        if body.count(END) == 1:
            if self._chunk(body):
                return None
            return self._send({"type": "http.response.body", "body": body, "more_body": True})
        events = split(body)
        for number, event in enumerate(events):
            if not self._chunk(event):
                return self._send_each(events[number:])
        return None

    def write_now(self, event: bytes) -> bool:
        """Write one whole event, if the response has started and that need not wait. Return whether it is written."""
        if not self.started or event.count(END) != 1 or not self._chunk(event):
            return False
        self._quiet = False
        return True

    async def end(self, body: Written) -> None:
        """Send the last events and end the response. If the last is long, wait until the client has read most of it."""
        if isinstance(body, list):
            await self._write_long(body)
            body = b""
        *events, last = split(body)
        if len(last) > UNREAD_BYTES:
            events, last = [*events, last], b""
        await self._send_each(events)
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_each(self, events: list[bytes]) -> None:
        for event in events:
            await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def _write_long(self, events: list[bytes | LongEvent]) -> None:
        """Send events of which some are long. Other tasks run between two parts of a long one."""
        for event in events:
            if isinstance(event, bytes):
                await written(self.write(event))
                continue
            async with self._whole:
                for part in event.parts:
                    self._quiet = False
                    await self._send({"type": "http.response.body", "body": part, "more_body": True})
                    await asyncio.sleep(0)

    async def pinged(self, writing: Coroutine[None, None, ResultT], interval_s: float) -> ResultT:
        """Run `writing` and return its result; send a ping whenever it has sent nothing for `interval_s`. Raises what
        `writing` raised; if it raised nothing, what sending a ping raised."""
        pinger = _Pinger(self, interval_s)
        try:
            result = await writing
        finally:
            sent = await pinger.stop()
        if sent is not None:
            sent.result()
        return result

    async def ping(self) -> None:
        async with self._whole:
            await self.start()
            await self._send({"type": "http.response.body", "body": self._ping(), "more_body": True})

    def was_quiet(self) -> bool:
        """Return whether nothing was written since this was last called."""
        quiet, self._quiet = self._quiet, True
        return quiet


class _Pinger:
    """Pings a stream that is quiet. It is a timer, and a task only while a ping is sent: most answers need none."""

    __slots__ = ("_interval_s", "_loop", "_sending", "_stream", "_timer")

    def __init__(self, stream: EventStream, interval_s: float) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._sending: asyncio.Task[None] | None = None
        """The task that sends a ping, or has failed to."""
        stream.was_quiet()
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(interval_s, self._look)

    def _look(self) -> None:
        if self._stream.was_quiet():
            self._timer = None
            self._sending = self._loop.create_task(self._send())
        else:
            self._timer = self._loop.call_later(self._interval_s, self._look)

    async def _send(self) -> None:
        await self._stream.ping()
        self._stream.was_quiet()
        self._sending, self._timer = None, self._loop.call_later(self._interval_s, self._look)

    async def stop(self) -> asyncio.Task[None] | None:
        """Ping no more. Return the task of a ping that was being sent, if it has ended by itself."""
        if self._timer is not None:
            self._timer.cancel()
        sending, self._sending = self._sending, None
        if sending is None:
            return None
        sending.cancel()
        await asyncio.wait({sending})
        return None if sending.cancelled() else sending


async def written(rest: Awaitable[None] | None) -> None:
    """Await what a `write` left to do, if anything."""
    if rest is not None:
        await rest


def split(body: bytes) -> list[bytes]:
    """Split a body into its events; an empty body is one empty piece. No event contains END: JSON has no line ends."""
    *events, rest = body.split(END)
    pieces = [event + END for event in events]
    return pieces if pieces and not rest else [*pieces, rest]


def whole_events(body: Written) -> Iterator[bytes]:
    """Yield the events for a reader that needs each in one piece: long ones in their `brief` form."""
    for piece in [body] if isinstance(body, bytes) else body:
        yield piece if isinstance(piece, bytes) else b"".join(piece.brief)


def data(json: bytes) -> bytes:
    """Return one event that carries this JSON."""
    return b"data: %b\n\n" % json
