"""Writes token probabilities as in llama-server's `completion_probabilities`.

Source: `completion_token_output` in tools/server/server-task.cpp of llama.cpp.
"""

from __future__ import annotations

import msgspec

from workers.protocol.events import Logprobs, TokenLogprob

LOWEST = -3.4028234663852886e38
"""The lowest 32-bit float, in place of minus infinity, which JSON lacks."""


class Likely(msgspec.Struct, frozen=True, gc=False):
    """One token. Many are written with each token of an answer: structs are encoded sooner than dicts."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class Entry(Likely, frozen=True, gc=False):
    top_logprobs: list[Likely]


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """One token with its probability after the samplers."""

    id: int
    token: str
    bytes: list[int]
    prob: float


class SampledEntry(Sampled, frozen=True, gc=False):
    top_probs: list[Sampled]


def entry(event: Logprobs, *, post_sampling: bool) -> Entry | SampledEntry:
    """Return the entry of one token of the answer."""
    if post_sampling:
        return SampledEntry(*_fields(event.chosen), [Sampled(*_fields(token)) for token in event.top])
    return Entry(*_fields(event.chosen), [Likely(*_fields(token)) for token in event.top])


def _fields(token: TokenLogprob) -> tuple[int, str, list[int], float]:
    piece, logprob = token.piece, token.logprob
    return token.token, piece.decode("utf-8", "ignore"), list(piece), logprob if logprob > LOWEST else LOWEST
