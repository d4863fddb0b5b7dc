"""The two wait limits of a call: one clock runs while its model has workers, another while it has none. Pure."""

from __future__ import annotations


class Patience:
    """The wait limits of one call. Each clock stands still while the other one runs, so that workers that come and go
    end no wait early, and make none endless. Times are time.monotonic().
    """

    __slots__ = ("_other_s", "deadline", "served")

    def __init__(self, now: float, *, served: bool, queue_deadline: float, start_deadline: float) -> None:
        """`queue_deadline`: when it stops waiting for a slot; `start_deadline`: when it stops waiting for a worker."""
        self.served = served
        """Whether its model has workers that take calls."""
        self.deadline = queue_deadline if served else start_deadline
        """When it stops waiting, unless `served` changes."""
        self._other_s = (start_deadline if served else queue_deadline) - now

    def turn(self, now: float, *, served: bool) -> bool:
        """Set whether the model has workers, and switch clocks if that is new. Return whether it is."""
        if served == self.served:
            return False
        self.served = served
        self.deadline, self._other_s = now + self._other_s, self.deadline - now
        return True
