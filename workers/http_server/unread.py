"""A bound on how long a peer may leave unread what was written for it."""

from __future__ import annotations

import asyncio
import logging
import math

log = logging.getLogger(__name__)


class UnreadTimer:
    """Cuts one connection whose peer has made no room in its full buffers for too long. Writes cost nothing more."""

    __slots__ = ("_loop", "_patience_s", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, patience_s: float) -> None:
        self._loop = loop
        self._patience_s = patience_s
        self._timer: asyncio.TimerHandle | None = None

    def full(self, transport: asyncio.Transport) -> None:
        """The buffers are full: they have to be read within the time. Told by `pause_writing`."""
        if self._patience_s < math.inf and self._timer is None:
            self._timer = self._loop.call_later(self._patience_s, self._cut, transport)

    def read(self) -> None:
        """There is room again, or the connection is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut(self, transport: asyncio.Transport) -> None:
        self._timer = None
        peer = transport.get_extra_info("peername")
        fields = {"peer": str(peer[0]) if peer else "", "unread_s": self._patience_s}
        log.warning("a connection was cut whose peer does not read", extra={"fields": fields})
        transport.abort()
