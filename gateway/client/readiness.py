"""Asking whether a server takes calls yet, as scripts: Paddock's `/ready`, or llama-server's `/health`."""

from __future__ import annotations

import time

import gateway.client.calls as calls
from gateway.client.ask import Pause, Script
from gateway.client.errors import (
    AuthenticationFailed,
    ConnectionFailed,
    NotFound,
    NotReady,
    Timeout,
    Unavailable,
)


def is_ready() -> Script[bool]:
    """False too where nobody answers. Raises the ClientError that waiting would not mend."""
    return (yield from _obstacle()) is None


def wait_until_ready(timeout: float, poll_interval: float) -> Script[None]:
    """Seconds both. Raises NotReady, and the ClientError that waiting would not mend."""
    deadline = time.monotonic() + timeout
    while (obstacle := (yield from _obstacle())) is not None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise NotReady(f"not ready within {timeout:g} s: {obstacle}")
        yield Pause(min(poll_interval, left))


def _obstacle() -> Script[str | None]:
    """What stands in the way now."""
    try:
        try:
            yield calls.readiness()
        except (NotFound, AuthenticationFailed):
            # A llama-server has no such route, and asks for a key before it says so.
            health = yield calls.health()
            return None if health.ok else health.message or health.status
    except (ConnectionFailed, Timeout, Unavailable) as error:
        return error.message
    return None
