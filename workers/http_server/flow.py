"""Flow control of a connection's reading: uvicorn's pauses, and one that nothing else may end."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl


class Flow(FlowControl):
    """uvicorn's flow control, with a pause that lasts: an application that waits for a body ends uvicorn's pauses, but
    `hold` lasts until `release`."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._held = False
        self._wanted = False

    def hold(self) -> None:
        """Read nothing until `release`."""
        if not self._held:
            self._held, self._wanted = True, not self.read_paused
            super().pause_reading()

    def release(self) -> None:
        """Read again, unless a pause was asked for meanwhile."""
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
