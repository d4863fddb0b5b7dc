"""Adds the prompt to a completion's text, and the probabilities of its tokens in either shape."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.api.answers import EncodedArray
from gateway.api.openai.completion_request import CompletionRequest
from gateway.api.openai.legacy_logprobs import LegacyCollector, Told, joined
from gateway.api.openai.logprobs import LogprobsCollector, logprobs_object
from workers.protocol.events import Logprobs, PromptLogprobs, Settings, Started
from workers.protocol.requests import GenerateRequest

_encode = msgspec.json.Encoder().encode


class Echo:
    """The prompt of one answer, where it is wanted. A text is told as it came, tokens as the worker reads them.

    With probabilities it is told when those of all its tokens are known.
    """

    def __init__(self, asked: CompletionRequest, number: int) -> None:
        prompt = asked.prompts[number * len(asked.prompts) // len(asked.requests)]
        self._text = prompt if asked.echo and isinstance(prompt, str) else ""
        self._by_worker = asked.echo and not isinstance(prompt, str)
        self.has_probs = bool(asked.requests[number].prompt_probs)
        self._num_tokens = 0

    def started(self, event: Started) -> str:
        """Return the part of the prompt that is to be told now."""
        self._num_tokens = event.num_prompt_tokens
        return "" if self.has_probs else self._text

    def in_settings(self, event: Settings) -> str:
        """Return the part of the prompt that is to be told now."""
        if self._by_worker:
            self._text = event.prompt
        return self._text if self._by_worker and not self.has_probs else ""

    def probs(self, event: PromptLogprobs, probs: Probabilities) -> str:
        """Return the part of the prompt that is to be told now: all of it with the last of its tokens, or nothing."""
        return self._text if probs.add_prompt(event, self._num_tokens, self._text) else ""


class Probabilities:
    """The probabilities of one answer's tokens."""

    def __init__(self, asked: CompletionRequest, request: GenerateRequest) -> None:
        self.wanted = bool(request.n_probs)
        self._legacy = LegacyCollector()
        self._modern = LogprobsCollector(request.post_sampling_probs)
        self.is_legacy = asked.legacy_logprobs
        self._tells_end = bool(request.prompt_probs)
        self._is_prompt_whole = not request.prompt_probs

    @property
    def waiting(self) -> bool:
        return self._is_prompt_whole and (bool(self._legacy) or bool(self._modern))

    @property
    def waiting_at_end(self) -> bool:
        """Whether some are told without text. Programs that weigh a text by `echo` count on an entry for each token."""
        return self._tells_end and self.waiting

    def add(self, event: Logprobs) -> None:
        (self._legacy if self.is_legacy else self._modern).add(event)

    def add_prompt(self, event: PromptLogprobs, num_tokens: int, text: str) -> bool:
        """Add those of the prompt's next tokens; return whether they were the last of `num_tokens`. `text`: the prompt.

        Only the older shape has a place for them.
        """
        if self._legacy.add_prompt(event.tokens) < num_tokens:
            return False
        self._legacy.end_prompt(text)
        self._is_prompt_whole = True
        return True

    def take(self) -> dict[str, Any]:
        """Return the probabilities of all tokens that waited for their text."""
        return self._legacy.take() if self.is_legacy else logprobs_object(self._modern.take())


class WholeProbabilities:
    """The probabilities of a whole answer, encoded as they come: all encoded at its end held up other streams."""

    def __init__(self, probs: Probabilities) -> None:
        self._probs = probs
        self._legacy: list[Told] = []
        self._modern: list[bytes] = []

    def add_waiting(self) -> None:
        """Take the probabilities whose text is there."""
        if self._probs.is_legacy:
            self._legacy.append(self._probs.take())
        else:
            self._modern += map(_encode, self._probs.take()["content"])

    def object(self) -> dict[str, Any]:
        return joined(self._legacy) if self._probs.is_legacy else logprobs_object(EncodedArray(self._modern))
