"""Shares a question that many ask at about the same time: it is put once, and all of them get the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SharedLook(Generic[T]):
    """Asks once for all who wait, on one event loop. One who leaves does not end the wait; all are told a failure."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]], fresh_s: float) -> None:
        """`fresh_s`: seconds for which an answer is told again, from when it was asked for."""
        self._ask = ask
        self._fresh_s = fresh_s
        self._asked_at = 0.0
        self._task: asyncio.Task[T] | None = None

    async def take(self) -> T:
        """Return an answer that is fresh, or the next one. Raises what asking raises."""
        if self._task is None or (self._task.done() and not self._is_fresh(self._task)):
            self._asked_at = time.monotonic()
            self._task = asyncio.create_task(self._ask())
            self._task.add_done_callback(_retrieve)
        return await asyncio.shield(self._task)

    def _is_fresh(self, task: asyncio.Task[T]) -> bool:
        is_answer = not task.cancelled() and task.exception() is None
        return is_answer and time.monotonic() - self._asked_at <= self._fresh_s


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve an exception that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
