"""Waiting for something to become true, with a bound."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Polls every 10 ms; returns the seconds it took; raises AssertionError naming `what` after the bound."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        await asyncio.sleep(0.01)
    return time.monotonic() - began


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """The same for tests without an event loop."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s"
        time.sleep(0.01)
