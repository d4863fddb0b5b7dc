"""Writes token probabilities in OpenAI's shape (`choices[].logprobs.content[]`), with llama-server's `id`.

With `post_sampling_probs` llama-server's fields, `prob` and `top_probs`, stand beside their logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.api.answers import EncodedArray
from workers.protocol.events import Logprobs, TokenLogprob

LEAST_PROB = 1e-37
"""The probability of a token that the samplers ruled out: JSON has no infinity for its logarithm."""


class Likely(msgspec.Struct, frozen=True, gc=False):
    """One token. Up to twenty are written with each token of an answer: structs are encoded sooner than dicts."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class Entry(Likely, frozen=True, gc=False):
    top_logprobs: list[Likely]


class SampledLikely(Likely, frozen=True, gc=False):
    prob: float


class SampledEntry(SampledLikely, frozen=True, gc=False):
    top_logprobs: list[SampledLikely]
    top_probs: list[SampledLikely]


class LogprobsCollector:
    """Holds the probabilities of tokens until text comes of them; tokens that become no text are never told."""

    def __init__(self, post_sampling: bool) -> None:
        self._post_sampling = post_sampling
        self._waiting: list[Logprobs] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, event: Logprobs) -> None:
        self._waiting.append(event)

    def take(self) -> list[Likely]:
        """Return the entries of all tokens that waited."""
        waiting, self._waiting = self._waiting, []
        return [_sampled(event) for event in waiting] if self._post_sampling else [_entry(event) for event in waiting]


def _entry(event: Logprobs) -> Entry:
    top = [
        Likely(token.token, token.piece.decode("utf-8", "replace"), list(token.piece), token.logprob)
        for token in event.top
    ]
    token, piece = event.chosen.token, event.chosen.piece
    return Entry(token, piece.decode("utf-8", "replace"), list(piece), event.chosen.logprob, top)


def _sampled(event: Logprobs) -> SampledEntry:
    top = [SampledLikely(*_prob(token)) for token in event.top]
    return SampledEntry(*_prob(event.chosen), top, top)


def _prob(token: TokenLogprob) -> tuple[int, str, list[int], float, float]:
    logarithm = math.log(max(token.logprob, LEAST_PROB))
    return token.token, token.piece.decode("utf-8", "replace"), list(token.piece), logarithm, token.logprob


def logprobs_object(content: Sequence[Likely] | EncodedArray) -> dict[str, Any]:
    return {"content": content, "refusal": None}
