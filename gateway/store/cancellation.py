"""A cancellation must not get lost in the Redis client."""

from __future__ import annotations

import asyncio


def raise_if_cancelled() -> None:
    """Raises CancelledError where this task was told to end and still runs; loops that use Redis ask once a round.

    redis-py sends through `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that arrives just as the
    command has been sent (python/cpython#86296).
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
