"""Writes a response of server-sent events as raw ASGI messages: what is done here is done once per token.

Source: WHATWG HTML, "Server-sent events"; a line that starts with a colon is a comment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from starlette.types import Send

from gateway.api.intake.disconnect import beside

END = b"\n\n"
"""The end of an event. Each event is one chunk of the response: there are clients that take a chunk for an event."""

UNREAD_BYTES = 64 << 10
"""Bytes of an answer that the server takes before it waits for the peer: uvicorn looks before it sends, not after."""

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
    """One event that repeats what others have told."""

    parts: Iterator[bytes]
    """All of the event; each part is made when it is its turn."""
    brief: Iterator[bytes]
    """The event for where it has to be in one piece: it repeats only what is short."""


Written = bytes | list[bytes | LongEvent]
"""Whole events. Where some are long, each of these is an item by itself, between the others."""


class Pings(NamedTuple):
    """The pings that keep a stream alive while there is nothing to say."""

    interval_s: float
    as_events: bool = False
    """Pings are events of the stream's own dialect in place of comments, which some clients take for events."""


class EventStream:
    """One streamed response. Starts when there is something to say: an event, or a ping because the caller waits."""

    __slots__ = ("_headers", "_ping", "_quiet", "_send", "_whole", "started")

    def __init__(self, send: Send, headers: Callable[[], Headers], ping: Callable[[], bytes] = lambda: PING) -> None:
        """`headers()` is asked once, at the start, for what is known by then; `ping()` for each ping: whole events."""
        self.started = False
        self._send = send
        self._headers = headers
        self._ping = ping
        self._quiet = True
        self._whole = asyncio.Lock()
        """Held while a ping is sent, or an event of several parts: a client that reads slowly makes both wait."""

    async def start(self) -> None:
        """Send status 200 and the headers, the first time."""
        if not self.started:
            self.started = True
            headers = STREAM_HEADERS + self._headers()
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    def write(self, body: Written) -> Awaitable[None]:
        """Send whole events. Waits while the client's buffers are full."""
        self._quiet = False
        if isinstance(body, list):
            return self._write_long(body)
        if body.count(END) > 1:
            return self._write_each(body)
        return self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: Written) -> None:
        """Send the last events and close the stream; a long one at its end is waited for until it has been read."""
        if isinstance(body, list):
            await self._write_long(body)
            body = b""
        *events, last = split(body)
        if len(last) > UNREAD_BYTES:
            events, last = [*events, last], b""
        for event in events:
            await self._send({"type": "http.response.body", "body": event, "more_body": True})
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def _write_each(self, body: bytes) -> None:
        for event in split(body):
            await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def _write_long(self, events: list[bytes | LongEvent]) -> None:
        """Send long events; other tasks get their turn between any two parts."""
        for event in events:
            if isinstance(event, bytes):
                await self.write(event)
                continue
            async with self._whole:
                for part in event.parts:
                    self._quiet = False
                    await self._send({"type": "http.response.body", "body": part, "more_body": True})
                    await asyncio.sleep(0)

    async def pinged(self, writing: Coroutine[None, None, ResultT], interval_s: float) -> ResultT:
        """Return what `writing` returns; whenever it sends nothing for `interval_s`, a ping is sent."""
        async with beside(self._ping_every(interval_s)):
            # In a task of its own, a token's wake-up does not pass through every frame of the way in. It is no task
            # group: a cancelled one is left, with all its frames, to the collector of cycles.
            return await asyncio.get_running_loop().create_task(writing)

    async def _ping_every(self, interval_s: float) -> None:
        while True:
            self._quiet = True
            await asyncio.sleep(interval_s)
            if not self._quiet:
                continue
            async with self._whole:
                await self.start()
                await self._send({"type": "http.response.body", "body": self._ping(), "more_body": True})


def split(body: bytes) -> list[bytes]:
    """Return the events, at least one piece: an empty body has an empty one. JSON has no line ends of its own."""
    *events, rest = body.split(END)
    pieces = [event + END for event in events]
    return pieces if pieces and not rest else [*pieces, rest]


def whole_events(body: Written) -> Iterator[bytes]:
    """Yield events for where each has to be in one piece, the long ones as their `brief` form."""
    for piece in [body] if isinstance(body, bytes) else body:
        yield piece if isinstance(piece, bytes) else b"".join(piece.brief)


def data(json: bytes) -> bytes:
    """Return one event that carries this JSON."""
    return b"data: %b\n\n" % json
