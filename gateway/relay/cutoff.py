"""Ends a call from outside, in one way for all reasons: its time is up, its client is too slow, its gateway stops."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from gateway.errors import PaddockError, RequestTimeout


class Cutoff:
    """A block that can be interrupted: `cut(error)` stops whatever it waits for, and the block ends with that error."""

    def __init__(self, deadline: float, limit: str) -> None:
        """`deadline` is a time.monotonic() after which the block ends by itself, because of `limit`."""
        self._when = asyncio.get_running_loop().time() + deadline - time.monotonic()
        self._timeout: asyncio.Timeout | None = None
        """Set while the block runs. It refers to the task, and so to its exception and all of its frames: kept longer,
        it would leave a call that was cut off to the garbage collector."""
        self._limit = limit
        self._error: PaddockError | None = None

    def limit(self, within_s: float, limit: str) -> None:
        """End the block `within_s` from now, because of `limit`, unless it ends sooner. Only within the block."""
        when = asyncio.get_running_loop().time() + within_s
        if self._timeout is not None and self._error is None and not self._timeout.expired() and when < self._when:
            self._when, self._limit = when, limit
            self._timeout.reschedule(when)

    def cut(self, error: PaddockError) -> None:
        """Interrupt the block with an error. Never waits; only the first counts, and none after the block has ended."""
        if self._timeout is not None and self._error is None and not self._timeout.expired():
            self._error = error
            self._timeout.reschedule(0)

    async def __aenter__(self) -> None:
        self._timeout = await asyncio.timeout_at(self._when).__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timeout, self._timeout = self._timeout, None
        if timeout is None:
            raise RuntimeError("left without being entered")
        try:
            await timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            if not timeout.expired():
                raise
            raise self._error or RequestTimeout(
                f"The request passed {self._limit}. Ask for fewer tokens or raise the limit."
            ) from None
