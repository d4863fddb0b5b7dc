"""A bound on how long a peer may leave unread what was written for it."""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import math
import termios
from contextlib import suppress

log = logging.getLogger(__name__)

LEAST_BYTES_PER_S = 1024
"""Whoever reads at least so fast is waited for: a large answer is one write, and takes its time on a thin line."""


class UnreadTimer:
    """Cuts one connection whose peer has made no room in its full buffers for too long. Writes cost nothing more."""

    __slots__ = ("_loop", "_num_unread", "_patience_s", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, patience_s: float) -> None:
        self._loop = loop
        self._patience_s = patience_s
        self._timer: asyncio.TimerHandle | None = None
        self._num_unread = 0
        """Bytes that the peer had not taken when it was looked at last."""

    def full(self, transport: asyncio.Transport) -> None:
        """The buffers are full: they have to be read within the time. Told by `pause_writing`."""
        if self._patience_s < math.inf and self._timer is None:
            self._num_unread = num_unread(transport)
            self._timer = self._loop.call_later(self._patience_s, self._look, transport)

    def read(self) -> None:
        """There is room again, or the connection is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, transport: asyncio.Transport) -> None:
        self._timer = None
        num_read = self._num_unread - num_unread(transport)
        if num_read >= LEAST_BYTES_PER_S * self._patience_s:
            self.full(transport)
        else:
            self._cut(transport)

    def _cut(self, transport: asyncio.Transport) -> None:
        peer = transport.get_extra_info("peername")
        fields = {"peer": str(peer[0]) if peer else "", "unread_s": self._patience_s}
        log.warning("a connection was cut whose peer does not read", extra={"fields": fields})
        transport.abort()


def num_unread(transport: asyncio.Transport) -> int:
    """Return the bytes that the peer has not taken: the transport's, and the kernel's where it tells (SIOCOUTQ)."""
    num_bytes = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    with suppress(OSError, AttributeError, ValueError):
        queued = array.array("i", [0])
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, queued)
        num_bytes += queued[0]
    return num_bytes
