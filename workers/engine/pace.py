"""How much of a prompt may be computed in a step that running streams wait for."""

from __future__ import annotations

TARGET_S = 0.2
"""How long a prompt may hold up running streams, per step. On a CPU a whole micro-batch can take seconds."""

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
