"""What the connections of one server share."""

from __future__ import annotations

from uvicorn.server import ServerState as UvicornState

from workers.http_server.connections import Connections, Unfinished
from workers.http_server.refusals import Form

MAX_MESSAGES_BYTES = 64 << 20
"""Of all messages that have begun and not ended."""


class ServerState(UvicornState):
    """uvicorn's state, which every protocol is built with, and what ours need beside it."""

    def __init__(self, form: Form, connections: Connections, max_message_bytes: int = 0) -> None:
        """`max_message_bytes`: of one message of a WebSocket."""
        super().__init__()
        self.form = form
        self.bounded = connections
        self.messages = Unfinished(max(MAX_MESSAGES_BYTES, 2 * max_message_bytes))
        """Of WebSockets."""
