r"""Writes token probabilities in OpenAI's two forms: `logprobs.content` of chats, and the four lists of completions.

Chats also have llama-server's `id`, and with `post_sampling_probs` its `prob` and `top_probs` beside the logarithms. In
completions, a token whose bytes are no valid UTF-8 is written as `bytes:\xe2\x82`, as OpenAI's servers do: with
replacement characters, several tokens would have the same name.

Source: OpenAI's API reference, "The chat completion object" and "The completion object".
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.api.http.answers import EncodedArray
from gateway.api.shapes import Entry, Likely
from workers.protocol.events import Logprobs, TokenLogprob, TokenProbs

LEAST_PROB = 1e-37
"""Probability written for a token that the samplers ruled out: the logarithm of 0 is infinite, which JSON lacks."""


class SampledLikely(Likely, frozen=True, gc=False):
    prob: float


class SampledEntry(SampledLikely, frozen=True, gc=False):
    top_logprobs: list[SampledLikely]
    top_probs: list[SampledLikely]


class LogprobsCollector:
    """Holds the probabilities of tokens until their text is written. Those of tokens without text are never written."""

    def __init__(self, post_sampling: bool) -> None:
        self._post_sampling = post_sampling
        self._waiting: list[Logprobs] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, event: Logprobs) -> None:
        self._waiting.append(event)

    def take(self) -> list[Likely]:
        """Return the entries of the tokens held, and hold them no longer."""
        waiting, self._waiting = self._waiting, []
        return (
            [_sampled_entry(event) for event in waiting]
            if self._post_sampling
            else [_entry(event) for event in waiting]
        )


def _entry(event: Logprobs) -> Entry:
    top = [
        Likely(token.token, token.piece.decode("utf-8", "replace"), list(token.piece), token.logprob)
        for token in event.top
    ]
    token, piece = event.chosen.token, event.chosen.piece
    return Entry(token, piece.decode("utf-8", "replace"), list(piece), event.chosen.logprob, top)


def _sampled_entry(event: Logprobs) -> SampledEntry:
    top = [SampledLikely(*_prob(token)) for token in event.top]
    return SampledEntry(*_prob(event.chosen), top, top)


def _prob(token: TokenLogprob) -> tuple[int, str, list[int], float, float]:
    logarithm = math.log(max(token.logprob, LEAST_PROB))
    return token.token, token.piece.decode("utf-8", "replace"), list(token.piece), logarithm, token.logprob


def logprobs_object(content: Sequence[Likely] | EncodedArray) -> dict[str, Any]:
    return {"content": content, "refusal": None}


LegacyLogprobs = dict[str, list[Any]]
"""The four lists by name. Items of `top_logprobs` are JSON already: encoding all at the end blocked other streams."""

_encode = msgspec.json.Encoder().encode


class LegacyCollector:
    """Holds the probabilities of tokens, as the four lists, until the text that they belong to is written."""

    def __init__(self) -> None:
        self._told = empty_lists()
        self._lengths: list[int] = []
        """Number of characters of each prompt token added so far."""
        self._offset = 0
        """Number of characters of the text before the next token."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __bool__(self) -> bool:
        return bool(self._told["tokens"])

    def add(self, event: Logprobs) -> None:
        self._told["text_offset"].append(self._offset)
        self._add(event.chosen, event.top)
        self._offset += len(self._decoder.decode(event.chosen.piece))

    def add_prompt(self, tokens: Sequence[TokenProbs]) -> int:
        """Add the prompt's next tokens, before any of the answer's; return how many prompt tokens were added so far."""
        for chosen, top in tokens:
            self._add(chosen, top)
            # A character split over several tokens counts with the last of them.
            self._lengths.append(len(self._decoder.decode(chosen.piece)))
        return len(self._lengths)

    def end_prompt(self, text: str) -> None:
        """Set the offset of each prompt token, once all have been added. `text`: the prompt as the answer shows it.

        The tokens can have more characters than `text`: those of a begin token, or the blank that some models put
        before a text. Tokens that `text` does not show get offset 0."""
        place = len(text) - sum(self._lengths)
        for length in self._lengths:
            self._told["text_offset"].append(max(0, place))
            place += length
        self._offset = len(text)
        # The first token has no probability: nothing comes before it.
        self._told["token_logprobs"][0], self._told["top_logprobs"][0] = None, msgspec.Raw(b"null")

    def take(self) -> LegacyLogprobs:
        """Return the lists of the tokens held, and hold them no longer."""
        told, self._told = self._told, empty_lists()
        return told

    def _add(self, chosen: TokenLogprob, top: Sequence[TokenLogprob]) -> None:
        self._told["token_logprobs"].append(chosen.logprob)
        self._told["tokens"].append(_name(chosen))
        self._told["top_logprobs"].append(msgspec.Raw(_encode(_top(chosen, top))))


def empty_lists() -> LegacyLogprobs:
    """Return the four lists without any items."""
    return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def join_lists(parts: Sequence[LegacyLogprobs]) -> dict[str, Any]:
    """Return the lists that several calls of `take` returned, joined."""
    told: dict[str, Any] = {name: [item for part in parts for item in part[name]] for name in empty_lists()}
    return {**told, "top_logprobs": EncodedArray(list(map(bytes, told["top_logprobs"])))}


def _top(chosen: TokenLogprob, likeliest: Sequence[TokenLogprob]) -> dict[str, float]:
    """Return text -> log probability of the likeliest tokens and the chosen one; for equal texts, the higher value."""
    top: dict[str, float] = {}
    for token in (*likeliest, chosen):
        name = _name(token)
        top[name] = max(token.logprob, top.get(name, token.logprob))
    return top


def _name(token: TokenLogprob) -> str:
    try:
        return token.piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.piece)
