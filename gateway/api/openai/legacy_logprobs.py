"""Token probabilities as OpenAI's completions tell them: four lists, a place for each token.

Source: OpenAI's API reference, "The completion object". A token that is no whole text is written as `bytes:\\xe2\\x82`,
as OpenAI's servers do: as replacement characters, several of them would be one name.
"""

from __future__ import annotations

import codecs
from typing import Any

from workers.protocol.events import Logprobs, TokenLogprob


class LegacyCollector:
    """Holds the probabilities of tokens until text comes of them; tokens that become no text are never told."""

    def __init__(self) -> None:
        self._waiting: list[Logprobs] = []
        self._offset = 0
        """Characters of the text before the next token."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, event: Logprobs) -> None:
        self._waiting.append(event)

    def take(self) -> dict[str, list[Any]]:
        """Of all that waited."""
        waiting, self._waiting = self._waiting, []
        told: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for event in waiting:
            told["text_offset"].append(self._offset)
            told["token_logprobs"].append(event.chosen.logprob)
            told["tokens"].append(_name(event.chosen))
            told["top_logprobs"].append(_top(event))
            self._offset += len(self._decoder.decode(event.chosen.piece))
        return told


def joined(parts: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Several `take`s as one."""
    names = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
    return {name: [item for part in parts for item in part[name]] for name in names}


def _top(event: Logprobs) -> dict[str, float]:
    """The likeliest ones and the chosen one; of two tokens that read the same the likelier."""
    top: dict[str, float] = {}
    for token in (*event.top, event.chosen):
        name = _name(token)
        top[name] = max(token.logprob, top.get(name, token.logprob))
    return top


def _name(token: TokenLogprob) -> str:
    try:
        return token.piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.piece)
