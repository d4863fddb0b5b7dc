"""How many probabilities a gateway holds of one request's answers: each is dozens of bytes, and a hundred may come with
every token.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.errors import InvalidRequest
from workers.protocol.events import CallEvent, Logprobs
from workers.protocol.requests import GenerateRequest

MAX_WHOLE_PROBS = 1 << 20
"""Of answers that are told whole at their end: some 70 MB of JSON."""
MAX_WAITING_PROBS = 1 << 17
"""Of tokens in a stream whose text has not come yet."""


class HeldProbs:
    """Counts them for one request."""

    def __init__(self, requests: Sequence[GenerateRequest], most: int) -> None:
        self.are_told = any(one.n_probs for one in requests)
        self._most = most
        self._num = 0

    def add(self, events: Sequence[CallEvent]) -> None:
        """Count those of these events. Raises InvalidRequest where they are too many."""
        self._num += sum(1 + len(event.top) for event in events if isinstance(event, Logprobs))
        if self._num > self._most:
            message = f"The answers have more than {self._most} probabilities that can't be sent yet. Ask for fewer "
            raise InvalidRequest(message + "with each token or for shorter answers, or have them streamed.")

    def clear(self) -> None:
        """Begin anew: what was counted has been sent."""
        self._num = 0
