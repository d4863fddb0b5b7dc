"""Hands steps from the engine's thread to the event loop: one wake-up at a time, however far behind the loop is."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from workers.protocol.events import CallEvent


class Mailbox:
    """A queue of steps. `put` is for the engine's thread; `deliver` is called on the loop, with all queued steps."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._steps: deque[tuple[int, list[CallEvent]]] = deque()
        self._scheduled = False
        self._deliver: Callable[[int, list[CallEvent]], None] | None = None

    def connect(self, deliver: Callable[[int, list[CallEvent]], None]) -> None:
        self._deliver = deliver

    def put(self, step: int, events: list[CallEvent]) -> None:
        """Queue a step's events. Never blocks. After the loop has closed, steps are dropped."""
        self._steps.append((step, events))
        if not self._scheduled:
            self._scheduled = True
            self._wake()

    def flush(self) -> None:
        """Deliver all queued steps; on the loop."""
        self._scheduled = False  # first, so that a step put from here on wakes the loop again
        steps = self._steps
        if self._deliver is None or not steps:
            return
        step, events = steps.popleft()
        if steps:
            events = list(events)
            while steps:
                step, more = steps.popleft()
                events += more
        self._deliver(step, events)

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self.flush)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            self._steps.clear()
