"""uvicorn's WebSocket protocol, with what it lacks: handshakes that always end, and a bound of a message's fragments.

HTTP is spoken by `workers.http_server`; here is how a gateway writes that server's own answers.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

from gateway.api.openai.error_shape import error_body
from gateway.errors import HeadTooLarge, HeadTooSlow, InvalidRequest, PaddockError, TooManyConnections
from workers.http_server.refusals import Refusal, response_of
from workers.http_server.state import ServerState

MAX_FRAGMENTS = 16_384
"""Of one message: empty ones count for nothing in its size, and each takes memory."""

ERRORS: dict[int, type[PaddockError]] = {
    400: InvalidRequest,
    408: HeadTooSlow,
    431: HeadTooLarge,
    503: TooManyConnections,
}


def refusal_body(refusal: Refusal) -> bytes:
    """Return the body of an answer that the server gives itself, as OpenAI's dialect tells errors."""
    return error_body(ERRORS[refusal.status](refusal.message))


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One WebSocket. It begins as a connection of `workers.http_server.protocol`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._server = server_state

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.bounded.gone(self)
        super().connection_lost(exc)

    def make_room(self) -> None:
        """Never asked for: a WebSocket is not idle while it is open (`gateway.api.sockets` bounds them)."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            told = f"This is no handshake of a WebSocket: {self.conn.handshake_exc}. Send fewer and shorter headers."
            self.transport.write(response_of(Refusal(400, told), self._server.form))
            self.transport.close()

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
        elif not self.close_sent:
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, f"a message has more than {MAX_FRAGMENTS} fragments")
            self.handle_parser_exception()
