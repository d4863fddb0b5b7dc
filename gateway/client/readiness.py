"""Scripts that ask whether a server takes calls yet, at Paddock's `/ready` or llama-server's `/health`."""

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
    """Return whether the server takes calls; False if nothing answers. Raises ClientErrors that waiting can't mend."""
    return (yield from _obstacle()) is None


def wait_until_ready(timeout: float, poll_interval: float) -> Script[None]:
    """Wait until the server takes calls; both in seconds. Raises NotReady, and ClientErrors that waiting can't mend."""
    deadline = time.monotonic() + timeout
    while (obstacle := (yield from _obstacle())) is not None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise NotReady(f"not ready within {timeout:g} s: {obstacle}")
        yield Pause(min(poll_interval, left))


def _obstacle() -> Script[str | None]:
    """Return the reason why the server takes no calls now; None: it takes them."""
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
