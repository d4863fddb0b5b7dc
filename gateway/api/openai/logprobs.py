"""Token probabilities in OpenAI's shape (API reference, `choices[].logprobs.content[]`), with llama-server's `id`.

With `post_sampling_probs` the fields are llama-server's: `prob` and `top_probs`.
"""

from __future__ import annotations

from typing import Any

from workers.protocol.events import Logprobs, TokenLogprob


class LogprobsCollector:
    """Holds the probabilities of tokens until text comes of them; tokens that become no text are never told."""

    def __init__(self, post_sampling: bool) -> None:
        self._name = "prob" if post_sampling else "logprob"
        self._top = "top_probs" if post_sampling else "top_logprobs"
        self._waiting: list[Logprobs] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, event: Logprobs) -> None:
        self._waiting.append(event)

    def take(self) -> list[dict[str, Any]]:
        """Entries for all that waited."""
        waiting, self._waiting = self._waiting, []
        return [{**self._one(event.chosen), self._top: [self._one(token) for token in event.top]} for event in waiting]

    def _one(self, token: TokenLogprob) -> dict[str, Any]:
        return {
            "id": token.token,
            "token": token.piece.decode("utf-8", "replace"),
            "bytes": list(token.piece),
            self._name: token.logprob,
        }


def logprobs_object(content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": content, "refusal": None}
