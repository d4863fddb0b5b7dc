"""A worker's slot on this machine, which is empty while its model is unloaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from workers.protocol.exits import Exit
from workers.supervisor.child import Child


class WorkerSlot:
    """The slot of one worker. `keep` runs until `stop` was called, or until the worker may not be started again."""

    def __init__(self, make: Callable[[], Child]) -> None:
        """`make` returns a new child."""
        self._make = make
        self._child: Child | None = None
        self._wanted = True
        self._sent_away = False
        """Whether the child was told to leave and is not gone yet."""
        self._stopping = False
        self._go = asyncio.Event()
        self._go.set()

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def want(self, wanted: bool) -> None:
        """Set whether a worker is to run here. Never waits: one that must leave drains before another may start."""
        if wanted == self._wanted or self._stopping:
            return
        self._wanted = wanted
        if wanted:
            self._go.set()
            return
        self._go.clear()
        if self._child is not None:
            self._sent_away = True
            self._child.leave()

    async def keep(self) -> int:
        """Keep a worker here while one is wanted; return the last exit code (negative: a signal)."""
        code = int(Exit.OK)
        while True:
            await self._go.wait()
            if self._stopping:
                return code
            self._child = self._make()
            code = await self._child.keep()
            if self._stopping or not self._sent_away:
                return code
            self._sent_away, self._child = False, None

    async def stop(self) -> None:
        """Drain the worker within its bound; return when nothing runs."""
        self._stopping = True
        self._go.set()
        if self._child is not None:
            await self._child.stop()

    def hurry(self) -> None:
        if self._child is not None:
            self._child.hurry()
