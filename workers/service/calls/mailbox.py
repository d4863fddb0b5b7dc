"""Hands steps from the engine's thread to the event loop: one wake-up at a time, however far behind the loop is."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from workers.protocol.events import CallEvent

Deliver = Callable[[int, list[CallEvent]], None]


class Mailbox:
    """A queue of steps. `put` is for the engine's thread; once it is open, the loop delivers all queued steps."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_failure: Callable[[BaseException], None]) -> None:
        """`on_failure` is told of an error by which a step is lost."""
        self._loop = loop
        self._on_failure = on_failure
        self._steps: deque[tuple[int, list[CallEvent]]] = deque()
        self._scheduled = True  # until somebody takes steps, nobody is woken
        self._deliver: Deliver

    def open(self, deliver: Deliver) -> None:
        """Have `deliver` called on the loop, once for all steps that are queued by then."""
        self._deliver = deliver
        self.flush()

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
        if not steps:
            return
        step, events = steps.popleft()
        if steps:
            events = list(events)
            while steps:
                step, more = steps.popleft()
                events += more
        try:
            self._deliver(step, events)
        except Exception as error:  # noqa: BLE001 - the loop's edge: a lost step would leave its calls silent for ever
            self._on_failure(error)

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self.flush)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            self._steps.clear()
