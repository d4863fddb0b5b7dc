"""The record of one call (`Tape`)."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

UNFINISHED = "unfinished"
"""Value of `error` for a call that was left because the run was ended."""


def _no_times() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Tape:
    """The record of one call. Times: time.perf_counter(). `due`: when it was to be sent, from which waits count."""

    due: float
    team: str = ""
    sent: float = 0.0
    ended: float = 0.0
    times: array[float] = field(default_factory=_no_times)
    """When each piece of the answer came."""
    tokens: int = 0
    """Tokens of the answer, as the server counts; the number of pieces where it does not tell."""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    error: str = ""
    """Kind of the error (see `reading`); empty: there is none."""
    detail: str = ""
    position: int | None = None
    """First position in the server's queue; 0: it did not wait. None: not told."""
    wait_s: float | None = None
    """Wait that the server predicted first."""

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.due

    @property
    def e2e_s(self) -> float:
        return self.ended - self.due

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first; 0 where there was one only."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def late_s(self) -> float:
        """Seconds between when it was due and when it was sent, which is the fault of the generator."""
        return max(0.0, self.sent - self.due)

    @property
    def good(self) -> bool:
        return not self.error and bool(self.ended)

    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]
