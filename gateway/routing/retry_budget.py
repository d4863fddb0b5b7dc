"""Bounds retries to a share of a model's calls, so that they do not make trouble everywhere worse. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_S = 10
FLOOR = 10
"""Retries within the window that are free, so that one worker's end costs a quiet fleet no call."""


@dataclass(slots=True)
class _Second:
    number: int
    calls: int = 0
    retries: int = 0


class RetryBudget:
    """The retry budgets of one gateway, by model. Times are seconds by the caller's clock, which does not go back."""

    def __init__(self, share: float) -> None:
        """`share` of the calls of the last WINDOW_S seconds may be retries, and FLOOR more."""
        self._share = share
        self._seconds: dict[str, deque[_Second]] = {}

    def called(self, model: str, now: float) -> None:
        """Count a new call of the model."""
        self._now(model, now).calls += 1

    def take(self, model: str, now: float) -> bool:
        """Return whether one more call may be tried again, and count it if so."""
        second = self._now(model, now)
        seconds = self._seconds[model]
        allowed = FLOOR + self._share * sum(each.calls for each in seconds)
        if sum(each.retries for each in seconds) + 1 > allowed:
            return False
        second.retries += 1
        return True

    def _now(self, model: str, now: float) -> _Second:
        seconds = self._seconds.setdefault(model, deque(maxlen=WINDOW_S))
        number = int(now)
        while seconds and seconds[0].number <= number - WINDOW_S:
            seconds.popleft()
        if not seconds or seconds[-1].number != number:
            seconds.append(_Second(number))
        return seconds[-1]
