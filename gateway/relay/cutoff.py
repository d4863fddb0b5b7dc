"""The one way to end a call from outside: its time is up, its client is too slow, its gateway stops."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from gateway.errors import PaddockError, RequestTimeout


class Cutoff:
    """Around a block: `cut(error)` interrupts whatever the block waits for, and the block ends with that error."""

    def __init__(self, deadline: float, limit: str) -> None:
        """`deadline` is a time.monotonic() after which the block ends by itself, because of `limit`."""
        when = asyncio.get_running_loop().time() + deadline - time.monotonic()
        self._timeout = asyncio.timeout_at(when)
        self._limit = limit
        self._error: PaddockError | None = None
        self._open = False

    def cut(self, error: PaddockError) -> None:
        """Never waits; only the first one counts, and none after the block has ended."""
        if self._open and self._error is None and not self._timeout.expired():
            self._error = error
            self._timeout.reschedule(0)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._open = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            if not self._timeout.expired():
                raise
            raise self._error or RequestTimeout(
                f"The request passed {self._limit}. Ask for fewer tokens or raise the limit."
            ) from None
