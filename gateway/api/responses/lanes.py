"""Runs the responses of one connection: those of a lane one after the other, lanes beside each other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from gateway.api.responses.messages import Create
from gateway.errors import StreamLimit

MAX_LANES = 16
"""Most lanes that have something to do."""
MAX_MESSAGES = 32
"""Most messages that wait or are being answered."""


class Held(Protocol):
    """The memory that a message holds of the budget."""

    def close(self) -> None: ...


HeldT = TypeVar("HeldT", bound=Held)


class Lanes(Generic[HeldT]):
    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        respond: Callable[[Create, HeldT], Awaitable[None]],
        on_rest: Callable[[], None],
        max_bytes: int,
    ) -> None:
        """`respond` raises nothing. `on_rest` is called when there is nothing to do any more. `max_bytes`: most bytes
        of all messages that wait or are being answered; a single one may have any number.
        """
        self._tasks = tasks
        self._respond = respond
        self._on_rest = on_rest
        self._max_bytes = max_bytes
        self._waiting: dict[str, deque[tuple[Create, HeldT]]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._num_messages = 0
        self._num_bytes = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def add(self, message: Create, held: HeldT) -> None:
        """Have a message answered, in its turn; `held` is closed when that is over. Raises StreamLimit."""
        self._check(message)
        self._num_messages += 1
        self._num_bytes += message.num_bytes
        lane = self._waiting.get(message.lane)
        if lane is not None:
            lane.append((message, held))
            return
        lane = self._waiting[message.lane] = deque([(message, held)])
        task = self._tasks.create_task(self._run(message.lane, lane))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # A task that is cancelled before its first step never comes to its end.
        task.add_done_callback(lambda _: self._end(message.lane, lane))

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()

    def _check(self, message: Create) -> None:
        if message.lane not in self._waiting and len(self._waiting) >= MAX_LANES:
            text = f"{MAX_LANES} streams are at work on this connection. Wait for one, or open another connection."
        elif self._num_messages >= MAX_MESSAGES:
            text = f"{MAX_MESSAGES} requests wait on this connection. Wait for their responses before sending more."
        elif self._num_messages and self._num_bytes + message.num_bytes > self._max_bytes:
            text = f"The requests that wait on this connection have more than {self._max_bytes} bytes together. Wait."
        else:
            return
        raise StreamLimit(text, param="stream_id")

    async def _run(self, name: str, lane: deque[tuple[Create, HeldT]]) -> None:
        try:
            while lane:
                message, held = lane[0]
                await self._respond(message, held)
                lane.popleft()
                held.close()
                self._num_messages -= 1
                self._num_bytes -= message.num_bytes
        finally:
            self._end(name, lane)

    def _end(self, name: str, lane: deque[tuple[Create, HeldT]]) -> None:
        """Give back what the lane's messages hold. Calling it again does nothing."""
        if self._waiting.get(name) is not lane:
            return
        for _, held in lane:
            held.close()
        lane.clear()
        del self._waiting[name]
        if not self._waiting:
            self._on_rest()
