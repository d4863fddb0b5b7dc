"""uvicorn's protocols, with what they lack: handshakes that always end, and bounds: of the head of a request, of the
time that it takes, and of the fragments of a message."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

from gateway.api.openai.error_shape import error_body
from gateway.errors import HeadTooLarge, HeadTooSlow, InvalidRequest

MAX_FRAGMENTS = 16_384
"""Of one message: empty ones count for nothing in its size, and each takes memory."""

MAX_HEAD_BYTES = 64 << 10
"""Of a request's line and headers, without the read that they began in."""
HEAD_S = 60.0
"""How long a head may take from its first byte on."""

REFUSED = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"


def refused(error: InvalidRequest) -> bytes:
    """A whole response."""
    status, body = HTTPStatus(error.status), error_body(error)
    return REFUSED % (status, status.phrase.encode(), len(body), body)


class HttpProtocol(HttpToolsProtocol):
    _in_head = True
    _head_begun = False
    """In this read."""
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Balancers open connections in advance, and keep them as they keep idle ones.
        self._head_timer = self.loop.call_later(self.timeout_keep_alive, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_has_come()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_begun = False
        super().data_received(data)
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            self._head_has_come()
        elif self._in_head:
            self._head_goes_on(len(data))
        else:
            self._head_has_come()
            if self._is_free and self.timeout_keep_alive_task is None:
                # What came was no request: an empty line, the rest of a body that was not wanted.
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

    def on_message_begin(self) -> None:
        self._in_head, self._head_begun, self._head_bytes = True, True, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # behind a body they are trailers, which nobody reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def _head_goes_on(self, num_bytes: int) -> None:
        if not self._head_bytes:
            self._head_has_come()
        # How much of the read that it began in belongs to it is not known: a body may lie before.
        self._head_bytes += 1 if self._head_begun else num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            told = f"The head of the request has more than {MAX_HEAD_BYTES >> 10} KiB. Send fewer and shorter headers."
            self._refuse(HeadTooLarge(told))
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._head_is_late)

    def _head_has_come(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_free and self._head_bytes:
            self._refuse(HeadTooSlow(f"The head of the request did not come in {HEAD_S:.0f} s. Send it at once."))
        elif self._is_free:
            self.transport.close()

    @property
    def _is_free(self) -> bool:
        """No answer is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self, error: InvalidRequest) -> None:
        """The last word of the connection; within an answer it can only be cut."""
        if self._is_free:
            self.transport.write(refused(error))
        self.transport.close()

    def _should_upgrade(self) -> bool:
        """Whether a request begins a WebSocket. Other methods than GET are answered as if they had not asked.

        An answer under way would lose its connection, and with it all that slows it down or ends it.
        """
        return self._is_free and self.scope["method"] == "GET" and super()._should_upgrade()


class WebSocketProtocol(WebSocketsSansIOProtocol):
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            told = f"This is no handshake of a WebSocket: {self.conn.handshake_exc}. Send fewer and shorter headers."
            self.transport.write(refused(InvalidRequest(told)))
            self.transport.close()

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
        elif not self.close_sent:
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, f"a message has more than {MAX_FRAGMENTS} fragments")
            self.handle_parser_exception()
