"""Keeps what the connections of one server share, and writes the answers that the server gives without calling an
application.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from uvicorn.server import ServerState as UvicornState

from workers.http_server.connections import Connections, Unfinished
from workers.http_server.pacer import KnownCallers, Pacer, ParseTurns

RESPONSE = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error answer after which the connection ends. `message` names the thing, the limit and the remedy."""

    status: int
    message: str


Form = Callable[[Refusal], bytes]
"""A function that returns the JSON body of a refusal, in the form of the service's other errors."""


def response_of(refusal: Refusal, form: Form) -> bytes:
    """Return the whole HTTP response of a refusal, which says that the connection will be closed."""
    status, body = HTTPStatus(refusal.status), form(refusal)
    return RESPONSE % (status, status.phrase.encode(), len(body), body)


MAX_MESSAGES_BYTES = 64 << 20
"""Maximum bytes of all unfinished WebSocket messages together (see `Unfinished`); two of the longest always fit."""


CLOSED_AT_ONCE = 32


class Closing:
    """Closes transports, `CLOSED_AT_ONCE` per iteration of the event loop: thousands at once would block all else."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Transport] = deque()

    def add(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        """Have a transport closed soon."""
        if not self._waiting:
            loop.call_soon(self._close_some, loop)
        self._waiting.append(transport)

    def _close_some(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(CLOSED_AT_ONCE, len(self._waiting))):
            self._waiting.popleft().close()
        if self._waiting:
            loop.call_soon(self._close_some, loop)


class ServerState(UvicornState):
    """The state that all connections of one server share: uvicorn's own, and what Paddock's protocols need."""

    def __init__(
        self,
        form: Form,
        connections: Connections,
        max_message_bytes: int = 0,
        callers: KnownCallers | None = None,
        without_certificate: frozenset[bytes] = frozenset(),
    ) -> None:
        """`max_message_bytes`: longest WebSocket message. `callers`: callers whose keys were verified lately, added
        by whoever verifies them; None: nobody has a key. `without_certificate`: as in `Tls`."""
        super().__init__()
        self.form = form
        self.bounded = connections
        self.without_certificate = without_certificate
        self.callers = callers or KnownCallers()
        self.pacer = Pacer(rests=callers is not None)
        self.departures = Pacer(rests=callers is not None, contested=True)
        """Requests and WebSockets whose peers have left. Ending one takes as long as beginning it, and hundreds can
        leave together."""
        self.parse_turns = ParseTurns()
        self.closing = Closing()
        self.messages = Unfinished(max(MAX_MESSAGES_BYTES, 2 * max_message_bytes))
        """Unfinished WebSocket messages."""
