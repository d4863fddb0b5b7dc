"""Raises cancellations that the Redis client has swallowed."""

from __future__ import annotations

import asyncio


def raise_if_cancelled() -> None:
    """Raise CancelledError where this task was cancelled and still runs; loops that use Redis call this every round.

    redis-py sends through `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that arrives just as the
    command has been sent (python/cpython#86296).
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
