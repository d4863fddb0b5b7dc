"""Sends and receives the messages of a WebSocket; counts all open ones, and stops them when the gateway ends.

Source: RFC 6455; ASGI, "WebSocket" and its extension "WebSocket Denial Response".
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from starlette.types import Message, Receive, Send

from gateway.access.control import Shares, most_of_team
from gateway.api.intake.disconnect import ClientGone
from gateway.back_pressure import too_many_sockets, too_many_sockets_of_key, too_many_sockets_of_team
from gateway.call import Principal

METHOD = "WEBSOCKET"
"""Stands for the HTTP method of a WebSocket, in routes and log lines."""

SWITCHED = 101
"""The HTTP status, in the log, of a WebSocket that was accepted."""
NORMAL, RESTARTS = 1000, 1012
"""WebSocket close codes: the connection is over, or the service restarts."""

SEVERED = (OSError, RuntimeError)
"""Errors of sending on a closed connection. RuntimeError: the server closed it for a too long or invalid message."""

Headers = list[tuple[bytes, bytes]]


class Socket:
    """One WebSocket connection. Its methods raise ClientGone if the client has gone."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send

    async def accept(self, headers: Headers) -> None:
        await self._receive()
        await self._tell({"type": "websocket.accept", "headers": headers})

    async def receive(self) -> str | bytes | None:
        """Return the next message: a short text, or a long text's bytes, perhaps no UTF-8; None: it was binary."""
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            raise ClientGone
        text: str | bytes | None = message["bytes"] if message.get("is_text") else message.get("text")
        return text

    async def send(self, text: str) -> None:
        """Send one message. Waits while the client's buffers are full."""
        # This runs once per token, so it does without `_tell`.
        try:
            await self._send({"type": "websocket.send", "text": text})
        except SEVERED:
            raise ClientGone from None

    async def close(self, code: int, reason: str) -> None:
        """Close the connection. `reason`: up to 123 bytes."""
        await self._tell({"type": "websocket.close", "code": code, "reason": reason})

    async def _tell(self, message: Message) -> None:
        try:
            await self._send(message)
        except SEVERED:
            raise ClientGone from None


def refusing(send: Send) -> Send:
    """Return a `send` that turns an HTTP answer into the refusal of a WebSocket handshake."""

    async def told(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    return told


class Stoppable(Protocol):
    def stop(self) -> None:
        """Close the connection once the requests that run on it have ended."""
        ...


class Sockets:
    """Counts the open WebSockets, and limits their number in all, by API key and by team."""

    def __init__(self, most: int, most_per_key: int) -> None:
        self._most = most
        self._shares = Shares(most_per_key, most_of_team(most, most_per_key))
        self._open: dict[Stoppable, float] = {}
        """Connection -> time.monotonic() at which it was opened."""

    @property
    def num_open(self) -> int:
        return len(self._open)

    def check(self, principal: Principal) -> None:
        """Raise TooManySockets if the key or its team may open no more, TooManyConnections if this gateway may not."""
        shares = self._shares
        if shares.is_full_for_key(principal.key_id):
            raise too_many_sockets_of_key(shares.most_per_key)
        if shares.is_full_for_team(principal.team):
            raise too_many_sockets_of_team(shares.most_per_team, principal.team)
        if len(self._open) >= self._most:
            raise too_many_sockets(self._most)

    @contextmanager
    def opened(self, connection: Stoppable, principal: Principal) -> Iterator[None]:
        """Count a connection while the block lasts. Raises what `check` raises."""
        self.check(principal)
        self._shares.take(principal.key_id, principal.team)
        self._open[connection] = time.monotonic()
        try:
            yield
        finally:
            del self._open[connection]
            self._shares.give_back(principal.key_id, principal.team)

    def stop(self, *, older_than_s: float = 0.0) -> None:
        """Stop connections opened at least `older_than_s` ago; newer ones keep time to send their first request."""
        before = time.monotonic() - older_than_s
        for connection, opened_at in self._open.items():
            if opened_at <= before:
                connection.stop()
