"""uvicorn's protocols, with what they lack: handshakes that always end, and a bound of the fragments of a message."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

from gateway.api.openai.error_shape import error_body
from gateway.errors import InvalidRequest

MAX_FRAGMENTS = 16_384
"""Of one message: empty ones count for nothing in its size, and each takes memory."""

REFUSED = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
)


class HttpProtocol(HttpToolsProtocol):
    def _should_upgrade(self) -> bool:
        """Whether a request begins a WebSocket. Other methods than GET are answered as if they had not asked.

        An answer under way would lose its connection, and with it all that slows it down or ends it.
        """
        is_free = self.cycle is None or self.cycle.response_complete
        return is_free and self.scope["method"] == "GET" and super()._should_upgrade()


class WebSocketProtocol(WebSocketsSansIOProtocol):
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            told = f"This is no handshake of a WebSocket: {self.conn.handshake_exc}. Send fewer and shorter headers."
            body = error_body(InvalidRequest(told))
            self.transport.write(REFUSED % (len(body), body))
            self.transport.close()

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
        elif not self.close_sent:
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, f"a message has more than {MAX_FRAGMENTS} fragments")
            self.handle_parser_exception()
