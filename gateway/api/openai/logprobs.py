r"""Writes token probabilities in OpenAI's two forms: `logprobs.content` of chats, and the four lists of completions.

Chats have llama-server's `id` beside; with `post_sampling_probs` its fields, `prob` and `top_probs`, stand beside their
logarithms. In completions a token that is no whole text is written as `bytes:\xe2\x82`, as OpenAI's servers do: as
replacement characters, several of them would be one name.

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
"""The probability of a token that the samplers ruled out: JSON has no infinity for its logarithm."""


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
"""The four lists by name. Likely tokens are encoded as they come: encoding all at the end held up other streams."""

_encode = msgspec.json.Encoder().encode


class LegacyCollector:
    """Holds the probabilities of tokens until the text that they are told with is there."""

    def __init__(self) -> None:
        self._told = empty_lists()
        self._lengths: list[int] = []
        """Characters of each of the prompt's tokens so far."""
        self._offset = 0
        """Characters of the text before the next token."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __bool__(self) -> bool:
        return bool(self._told["tokens"])

    def add(self, event: Logprobs) -> None:
        self._told["text_offset"].append(self._offset)
        self._add(event.chosen, event.top)
        self._offset += len(self._decoder.decode(event.chosen.piece))

    def add_prompt(self, tokens: Sequence[TokenProbs]) -> int:
        """Add those of the prompt's next tokens, before any others; return how many of its tokens there are now."""
        for chosen, top in tokens:
            self._add(chosen, top)
            # A character that is cut into several tokens comes with the last.
            self._lengths.append(len(self._decoder.decode(chosen.piece)))
        return len(self._lengths)

    def end_prompt(self, text: str) -> None:
        """Give all tokens of the prompt, which have come by now, their offsets in `text`, the prompt as it is told.

        The tokens may read as more than the text: a begin token, or the blank that some models put before a text. The
        surplus is placed at its start.
        """
        place = len(text) - sum(self._lengths)
        for length in self._lengths:
            self._told["text_offset"].append(max(0, place))
            place += length
        self._offset = len(text)
        # The first token has no probability: nothing comes before it.
        self._told["token_logprobs"][0], self._told["top_logprobs"][0] = None, msgspec.Raw(b"null")

    def take(self) -> LegacyLogprobs:
        """Return the lists of all tokens that waited."""
        told, self._told = self._told, empty_lists()
        return told

    def _add(self, chosen: TokenLogprob, top: Sequence[TokenLogprob]) -> None:
        self._told["token_logprobs"].append(chosen.logprob)
        self._told["tokens"].append(_name(chosen))
        self._told["top_logprobs"].append(msgspec.Raw(_encode(_top(chosen, top))))


def empty_lists() -> LegacyLogprobs:
    """Return the lists of no tokens."""
    return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def join_lists(parts: Sequence[LegacyLogprobs]) -> dict[str, Any]:
    """Return the lists of several `take`s as one."""
    told: dict[str, Any] = {name: [item for part in parts for item in part[name]] for name in empty_lists()}
    return {**told, "top_logprobs": EncodedArray(list(map(bytes, told["top_logprobs"])))}


def _top(chosen: TokenLogprob, likeliest: Sequence[TokenLogprob]) -> dict[str, float]:
    """Return the likeliest tokens and the chosen one; of two that read the same, the likelier."""
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
