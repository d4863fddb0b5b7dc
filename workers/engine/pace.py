"""How much of a prompt may be computed in a step that running streams wait for."""

from __future__ import annotations

TARGET_S = 1.0
"""How long a prompt may hold up running streams, per step. It binds where a whole micro-batch takes seconds, on a CPU.

Shorter steps smooth the running streams and cost everyone: a step has a fixed price (about 55 ms with a 0.5 B model on
one core), and calls that start staggered end staggered, in steps that are not full. 16 calls of 54 prompt tokens at
once took 17.2, 16.9, 15.7, 15.1 and 13.3 s of CPU at 0.2, 0.4, 0.7, 1.0 s and without a bound.
"""

_WEIGHT = 0.3
"""Of the newest measurement, against all before it."""


class PrefillPace:
    """Learns what a token costs on this device. `budget` lies between `least` and `most` tokens."""

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self._most = most
        self._token_s: float | None = None
        self.budget = most

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step that computed `num_tokens` took this long. Steps too small to tell are passed over."""
        if num_tokens < self._least:
            return
        token_s = seconds / num_tokens
        self._token_s = token_s if self._token_s is None else self._token_s + _WEIGHT * (token_s - self._token_s)
        self.budget = max(self._least, min(self._most, int(TARGET_S / max(self._token_s, 1e-9))))
