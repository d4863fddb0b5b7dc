"""Limits how often a Redis that can't be reached is tried again."""

from __future__ import annotations

import random
import time

from redis.exceptions import ConnectionError

FIRST_S = 0.02
LONGEST_S = 0.5


class Gate:
    """Lets connection attempts through. Each failure closes it, twice as long as before, less a random part."""

    def __init__(self, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._failures = 0
        self._opens_at = 0.0
        self._why = ""

    def enter(self) -> None:
        """Raise ConnectionError while it is closed. After a failure it lets one attempt through at a time."""
        if not self._failures:
            return
        now = time.monotonic()
        if now < self._opens_at:
            raise ConnectionError(f"not tried again yet: {self._why}")
        self._close(now)

    def failed(self, why: object) -> None:
        self._failures += 1
        self._why = str(why)
        self._close(time.monotonic())

    def passed(self) -> None:
        self._failures = 0

    def _close(self, now: float) -> None:
        # More doublings than this make no difference, and large powers are slow.
        longest_s = min(self._longest_s, self._first_s * 2 ** min(self._failures, 16))
        self._opens_at = now + longest_s * random.uniform(0.5, 1.0)  # noqa: S311 - not a secret
