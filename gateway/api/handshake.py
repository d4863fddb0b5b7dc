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
"""Of a request's line and headers; what came with it in one read may be more."""
HEAD_S = 60.0
"""How long a connection may take for a head, its first one included."""

REFUSED = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"


def refused(error: InvalidRequest) -> bytes:
    """A whole response."""
    status, body = HTTPStatus(error.status), error_body(error)
    return REFUSED % (status, status.phrase.encode(), len(body), body)


class HttpProtocol(HttpToolsProtocol):
    _in_head = True
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_S, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_has_come()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head:
            self._head_has_come()
        elif not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                told = (
                    f"The head of the request has more than {MAX_HEAD_BYTES >> 10} KiB. Send fewer and shorter headers."
                )
                self._refuse(HeadTooLarge(told))
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_S, self._head_is_late)

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

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
