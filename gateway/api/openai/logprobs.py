"""Token probabilities in OpenAI's shape (API reference, `choices[].logprobs.content[]`), with llama-server's `id`.

With `post_sampling_probs` llama-server's fields, `prob` and `top_probs`, stand beside their logarithms.
"""

from __future__ import annotations

import math
from typing import Any

from workers.protocol.events import Logprobs, TokenLogprob

LEAST_PROB = 1e-37
"""Of a token that the samplers ruled out: JSON has no infinity."""


class LogprobsCollector:
    """Holds the probabilities of tokens until text comes of them; tokens that become no text are never told."""

    def __init__(self, post_sampling: bool) -> None:
        self._post_sampling = post_sampling
        self._waiting: list[Logprobs] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, event: Logprobs) -> None:
        self._waiting.append(event)

    def take(self) -> list[dict[str, Any]]:
        """Entries for all that waited."""
        waiting, self._waiting = self._waiting, []
        return [self._entry(event) for event in waiting]

    def _entry(self, event: Logprobs) -> dict[str, Any]:
        top = [self._one(token) for token in event.top]
        entry = {**self._one(event.chosen), "top_logprobs": top}
        if self._post_sampling:
            entry["top_probs"] = top
        return entry

    def _one(self, token: TokenLogprob) -> dict[str, Any]:
        entry = {
            "id": token.token,
            "token": token.piece.decode("utf-8", "replace"),
            "bytes": list(token.piece),
            "logprob": token.logprob,
        }
        if self._post_sampling:
            entry["prob"], entry["logprob"] = token.logprob, math.log(max(token.logprob, LEAST_PROB))
        return entry


def logprobs_object(content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": content, "refusal": None}
