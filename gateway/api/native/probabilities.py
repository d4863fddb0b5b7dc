"""Token probabilities as llama-server tells them in `completion_probabilities`.

Source: `completion_token_output` in tools/server/server-task.cpp of llama.cpp.
"""

from __future__ import annotations

from typing import Any

from workers.protocol.events import Logprobs, TokenLogprob

LOWEST = -3.4028234663852886e38
"""In place of minus infinity, which JSON lacks: the lowest 32-bit float."""


def entry(event: Logprobs, *, post_sampling: bool) -> dict[str, Any]:
    name, top = ("prob", "top_probs") if post_sampling else ("logprob", "top_logprobs")
    return {**_one(event.chosen, name), top: [_one(token, name) for token in event.top]}


def _one(token: TokenLogprob, name: str) -> dict[str, Any]:
    return {
        "id": token.token,
        "token": token.piece.decode("utf-8", "ignore"),
        "bytes": list(token.piece),
        name: max(token.logprob, LOWEST),
    }
