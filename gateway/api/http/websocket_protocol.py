"""uvicorn's WebSocket protocol, with what uvicorn lacks: a handshake always ends, and messages are bounded.

`workers.http_server` serves HTTP. `refusal_body` writes the errors that this server sends by itself, in OpenAI's form.
"""

from __future__ import annotations

import asyncio
from functools import partial
from time import thread_time
from typing import ClassVar, cast

from uvicorn._types import ASGIReceiveEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

from gateway.api.openai.writing import error_body
from gateway.errors import (
    HeadTooLarge,
    HeadTooSlow,
    InvalidRequest,
    NotSupported,
    PaddockError,
    PermissionDenied,
    TooManyConnections,
    VersionNotSupported,
)
from gateway.settings import GatewaySettings
from gateway.telemetry.finish import PROBED
from workers.http_server.acceptor import raise_limit
from workers.http_server.connection import BoundedConnection
from workers.http_server.connections import ConnectionBounds
from workers.http_server.pacer import PARSE_S, Departure
from workers.http_server.state import Refusal, response_of

MAX_FRAGMENTS = 16_384
"""Maximum fragments of one message; more close the connection. Even an empty fragment takes memory."""

PIECE_BYTES = 4 << 10
"""Bytes parsed at once, which can be hundreds of the shortest frames."""
ITS_TURN_S = PARSE_S / 4
"""Processor seconds after which a connection with more to parse leaves the rest of the turn to others."""
LONG_TEXT_BYTES = 64 << 10
"""Bytes of a text message above which it is not decoded on the event loop."""

ERRORS: dict[int, type[PaddockError]] = {
    400: InvalidRequest,
    403: PermissionDenied,
    408: HeadTooSlow,
    431: HeadTooLarge,
    501: NotSupported,
    503: TooManyConnections,
    505: VersionNotSupported,
}


RESERVED_PATHS = frozenset(path.encode() for path in PROBED)
"""Paths that are answered even if there is no room for other requests."""


def connection_bounds(settings: GatewaySettings) -> ConnectionBounds:
    """Raise this process's limit of open files, and return the bounds on its connections."""
    return ConnectionBounds.of(
        raise_limit(), settings.max_connections, settings.address_share, RESERVED_PATHS, settings.reader_timeout_s
    )


def refusal_body(refusal: Refusal) -> bytes:
    """Return the body of an error that the server answers by itself, in the form of OpenAI's errors."""
    return error_body(ERRORS[refusal.status](refusal.message))


class WebSocketProtocol(BoundedConnection, WebSocketsSansIOProtocol):
    """One WebSocket connection. It began as an HTTP connection (`workers.http_server.protocol`)."""

    # fmt: off
    UVICORN_PARTS: ClassVar[tuple[str, ...]] = (
        "close_sent", "close_timeout", "close_timer", "conn", "connection_lost", "curr_msg_data_type", "data_received",
        "disconnected", "frames", "queue",
        "handle_bytes", "handle_cont", "handle_parser_exception", "handle_ping", "handle_text", "handshake_complete",
        "handshake_initiated", "keepalive_timeout", "loop", "on_task_complete", "pause_writing",
        "read_paused", "receive", "resume_writing", "send_receive_event_to_app", "shutdown", "transport",
        "writable",
    )
    # fmt: on
    """Attributes of uvicorn's class that are used or replaced here; at start, `server.check_parts` checks for them."""

    _digest: bytes | None = None
    """Digest of the API key in the handshake (`KnownCallers.digest_of`); None: no data has come yet."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.messages.ended(self)
        self._server.parse_turns.leave(self)
        # The websockets protocol is in a reference cycle, which would keep the bytes of an unfinished message.
        self.conn.reader.discard()
        self.frames = []
        departures = self._server.departures
        if departures.may_begin():
            super().connection_lost(exc)
            return
        self.disconnected = True  # what is sent from now on fails, and writes nothing
        address = self._server.bounded.address_of(self)
        departures.wait(
            Departure(partial(super().connection_lost, exc)), self._server.callers.known(self._digest or b""), address
        )

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._bound_leftovers()

    def handle_parser_exception(self) -> None:
        super().handle_parser_exception()
        self._bound_leftovers()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        if self.close_timer is not None:  # uvicorn's own timer would not bound how long the rest stays unread
            self.close_timer.cancel()
            self.close_timer = self.loop.call_later(self.close_timeout, self._close)
        self._bound_leftovers()

    def make_room(self) -> None:
        self.cut_unfinished()

    def cut_unfinished(self) -> None:
        if not self.handshake_complete or self.close_sent or self.transport.is_closing():
            self._close()
            return
        self.conn.fail(CloseCode.TRY_AGAIN_LATER, "too many large messages are under way; send this one again")
        self.handle_parser_exception()

    def data_received(self, data: bytes) -> None:
        if self._digest is None:
            self._digest = self._server.callers.digest_of(data)
        self._unread = self._unread + data if self._unread else data
        turns = self._server.parse_turns
        if not turns.waits(self) and turns.may_parse():
            self.parse_on()
        else:
            self.transport.pause_reading()
            self._parse_later()

    async def receive(self) -> ASGIReceiveEvent:
        event = await super().receive()
        self._server.messages.ended(self)
        if self._unread and not self.read_paused:
            self._parse_later()
        return event

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()  # drops the pong: pongs would pile up if the client does not read

    def send_receive_event_to_app(self) -> None:
        """Queue a complete message. A long text stays bytes, marked `is_text`: to decode it would block the loop."""
        is_long = self.curr_msg_data_type == "text" and sum(map(len, self.frames)) > LONG_TEXT_BYTES
        if not is_long or self.close_sent:
            super().send_receive_event_to_app()
            return
        text, self.frames = b"".join(self.frames), []
        self.queue.put_nowait(cast(ASGIReceiveEvent, {"type": "websocket.receive", "bytes": text, "is_text": True}))
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    # The parser keeps a connection's last frame until the next one comes, so each frame is emptied once it is handled.

    def handle_text(self, event: Frame) -> None:
        super().handle_text(event)
        event.data = b""

    def handle_bytes(self, event: Frame) -> None:
        super().handle_bytes(event)
        event.data = b""

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
            event.data = b""
        elif not self.close_sent:
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, f"a message has more than {MAX_FRAGMENTS} fragments")
            self.handle_parser_exception()

    def parse_on(self) -> None:
        """Parse some of the received bytes. Parsing tens of thousands of frames at once would block the loop."""
        if self.transport.is_closing() or self.read_paused:
            return
        began_at, num_bytes, took_s = thread_time(), 0, 0.0
        while (
            num_bytes < len(self._unread)
            and took_s < ITS_TURN_S
            and not (self.read_paused or self.transport.is_closing())
        ):
            try:
                super().data_received(self._unread[num_bytes : num_bytes + PIECE_BYTES])
            except BaseException:  # uvicorn's, of a peer who sends frames before it may; else it would stay paused
                self._unread = b""
                self.transport.abort()
                raise
            num_bytes += PIECE_BYTES
            took_s = thread_time() - began_at
        self._server.parse_turns.spent(took_s)
        num_bytes, self._unread = min(num_bytes, len(self._unread)), self._unread[num_bytes:]
        if self.conn.reader.buffer or self.frames or not self.queue.empty():
            self._server.messages.grew(self, num_bytes, self._caller())
        else:
            self._server.messages.ended(self)
        if self.transport.is_closing():
            self._bound_leftovers()
            return
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            told = f"This is no handshake of a WebSocket: {self.conn.handshake_exc}. Send fewer and shorter headers."
            self.transport.write(response_of(Refusal(400, told), self._server.form))
            self._close()
        elif self._unread:
            self.transport.pause_reading()
            if not self.read_paused:
                self._parse_later()
        elif not self.read_paused:
            self.transport.resume_reading()

    def _parse_later(self) -> None:
        self._server.parse_turns.wait(self, self._caller())

    def _caller(self) -> str:
        """Return to whom the connection's parsing time and bytes count: the caller's name if known, or the address."""
        return self._server.callers.known(self._digest or b"") or self._server.bounded.address_of(self)
