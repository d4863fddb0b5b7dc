"""The base of every connection of this server, HTTP or WebSocket: its state, and a bound on unread answers."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.config import Config

from workers.http_server.connections import Closable
from workers.http_server.state import ServerState
from workers.http_server.unread import UnreadTimer


class BoundedConnection(asyncio.Protocol):
    """A base in front of one of uvicorn's protocols; its methods call those of that protocol."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)  # type: ignore[call-arg]  # uvicorn's is next
        self._server = server_state
        self._unread = b""
        """Bytes received and not parsed yet."""
        self._unread_timer = UnreadTimer(self.loop, server_state.bounded.bounds.unread_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unread = b""
        self._unread_timer.read()
        self._server.bounded.gone(cast(Closable, self))
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer.full(self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_timer.read()
        self._bound_leftovers()

    def shutdown(self) -> None:
        """End the connection, since the server stops."""
        super().shutdown()  # type: ignore[misc]  # uvicorn's
        self._bound_leftovers()

    def _close(self) -> None:
        self.transport.close()
        self._bound_leftovers()

    def _bound_leftovers(self) -> None:
        """Bound the time that the peer has to read the rest, if it closes. Call where uvicorn may have closed it."""
        self._unread_timer.closing(self.transport)
