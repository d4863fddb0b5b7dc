"""The base class of the server's HTTP and WebSocket connections, which cuts off peers that leave their answers unread;
and a flow control with a pause that only its owner ends.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import math
import termios
from contextlib import suppress
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl

from workers.http_server.connections import Closable
from workers.http_server.state import ServerState

log = logging.getLogger(__name__)

LEFT_S = 30.0
"""Seconds for which a closing connection waits for its peer to read the rest, unless the server's bound is shorter."""
LEAST_BYTES_PER_S = 1024
"""Minimum bytes per second that a peer must read once its buffers are full. A slow line is no reason to cut it off."""


CHUNK = "paddock.chunk"
"""Name of an extension in the scope of HTTP requests: `Flow.write_chunk` of the connection."""


class UnreadTimer:
    """Cuts a connection with full buffers whose peer reads less than `LEAST_BYTES_PER_S`. Costs nothing per write."""

    __slots__ = ("_loop", "_num_unread", "_patience_s", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, patience_s: float) -> None:
        self._loop = loop
        self._patience_s = patience_s
        self._timer: asyncio.TimerHandle | None = None
        self._num_unread = 0
        """Bytes that the peer had not taken at the last check."""

    def full(self, transport: asyncio.Transport) -> None:
        """Start the timer, since the buffers are full. `pause_writing` calls this."""
        self._start(transport, self._patience_s)

    def closing(self, transport: asyncio.Transport) -> None:
        """Start the timer if the connection is closing and has bytes left, since it stays open until they are read."""
        if transport.is_closing() and transport.get_write_buffer_size():
            self._start(transport, min(self._patience_s, LEFT_S))

    def read(self) -> None:
        """Stop the timer: the buffers have room again, or the connection is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self, transport: asyncio.Transport, patience_s: float) -> None:
        if patience_s < math.inf and self._timer is None:
            self._num_unread = num_unread(transport)
            self._timer = self._loop.call_later(patience_s, self._look, transport, patience_s)

    def _look(self, transport: asyncio.Transport, patience_s: float) -> None:
        self._timer = None
        num_read = self._num_unread - num_unread(transport)
        if num_read >= LEAST_BYTES_PER_S * patience_s:
            self._start(transport, patience_s)
        else:
            self._cut(transport, patience_s)

    def _cut(self, transport: asyncio.Transport, patience_s: float) -> None:
        peer = transport.get_extra_info("peername")
        fields = {"peer": str(peer[0]) if peer else "", "unread_s": patience_s}
        log.warning("a connection was cut whose peer does not read", extra={"fields": fields})
        transport.abort()


def num_unread(transport: asyncio.Transport) -> int:
    """Return the number of bytes that the peer has not taken: those in the transport's buffer and, where the kernel
    reports them (SIOCOUTQ), in the socket's send queue."""
    num_bytes = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    with suppress(OSError, AttributeError, ValueError):
        queued = array.array("i", [0])
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, queued)
        num_bytes += queued[0]
    return num_bytes


class BoundedConnection(asyncio.Protocol):
    """A base class, listed before one of uvicorn's protocols, that cuts off a peer that leaves answers unread too long.

    Its methods call those of uvicorn's protocol by `super()`."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    handshake: Closable | None = None
    """The TLS handshake by which the connection was counted before it was made; None: it is not encrypted."""

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
        """End the connection, because the server stops."""
        super().shutdown()  # type: ignore[misc]  # uvicorn's
        self._bound_leftovers()

    def _close(self) -> None:
        self.transport.close()
        self._bound_leftovers()

    def _bound_leftovers(self) -> None:
        """Bound how long the connection, if closing, waits for its peer to read. Call after whatever may close it."""
        self._unread_timer.closing(self.transport)


class Flow(FlowControl):
    """uvicorn's flow control, with a pause of reading (`hold`) that only `release` ends. uvicorn's own pause ends when
    the application waits for a body."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._held = False
        self._wanted = False
        self._write = transport.write
        self._is_closing = transport.is_closing

    def write_chunk(self, body: bytes) -> bool:
        """Write a chunk of a chunked response whose head was sent and whose end was not. Return whether it was written:
        it is not if the buffers are full or the connection is closing; then ASGI's `send` does what is right.

        `CHUNK` in a request's scope is this method: a streamed token then costs one call in place of two coroutines."""
        if self.write_paused or self._is_closing():
            return False
        self._write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def end_chunks(self) -> None:
        """Let `write_chunk` write nothing more, as the connection has its last answer."""
        self._is_closing = lambda: True

    def hold(self) -> None:
        """Read nothing until `release`."""
        if not self._held:
            self._held, self._wanted = True, not self.read_paused
            super().pause_reading()

    def release(self) -> None:
        """End the pause; read again, unless uvicorn has paused reading meanwhile."""
        if self._held:
            self._held = False
            if self._wanted:
                super().resume_reading()

    def pause_reading(self) -> None:
        self._wanted = False
        super().pause_reading()

    def resume_reading(self) -> None:
        self._wanted = True
        if not self._held:
            super().resume_reading()
