"""What goes with a completion's text: the prompt before it, and the probabilities of its tokens in either shape."""

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
    """The prompt of one answer, where it is wanted. A text is told as it came; tokens are told as the worker reads.

    With probabilities it is told when those of all its tokens are known.
    """

    def __init__(self, asked: CompletionRequest, number: int) -> None:
        prompt = asked.prompts[number * len(asked.prompts) // len(asked.requests)]
        self._text = prompt if asked.echo and isinstance(prompt, str) else ""
        self._by_worker = asked.echo and not isinstance(prompt, str)
        self.has_probs = bool(asked.requests[number].prompt_probs)
        self._num_tokens = 0

    def started(self, event: Started) -> str:
        """Return what of the prompt is to be told now."""
        self._num_tokens = event.num_prompt_tokens
        return "" if self.has_probs else self._text

    def in_settings(self, event: Settings) -> str:
        """Return what of the prompt is to be told now."""
        if self._by_worker:
            self._text = event.prompt
        return self._text if self._by_worker and not self.has_probs else ""

    def probs(self, event: PromptLogprobs, probs: Probabilities) -> str:
        """Return what of the prompt is to be told now: all of it with the last of its tokens, or nothing."""
        return self._text if probs.add_prompt(event, self._num_tokens, self._text) else ""


class Probabilities:
    """Of the tokens of one answer."""

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
        """Whether some are told with no text. Programs that weigh a text by `echo` count on a place for each token."""
        return self._tells_end and self.waiting

    def add(self, event: Logprobs) -> None:
        (self._legacy if self.is_legacy else self._modern).add(event)

    def add_prompt(self, event: PromptLogprobs, num_tokens: int, text: str) -> bool:
        """Add those of the next tokens of a prompt of so many, which is told as `text` -> whether these were the last.

        Only the older shape has a place for them.
        """
        if self._legacy.add_prompt(event.tokens) < num_tokens:
            return False
        self._legacy.end_prompt(text)
        self._is_prompt_whole = True
        return True

    def take(self) -> dict[str, Any]:
        """Of all tokens that waited for their text."""
        return self._legacy.take() if self.is_legacy else logprobs_object(self._modern.take())


class WholeProbabilities:
    """Those of a whole answer, encoded as they come: encoding them all at its end held up other streams."""

    def __init__(self, probs: Probabilities) -> None:
        self._probs = probs
        self._legacy: list[Told] = []
        self._modern: list[bytes] = []

    def add_waiting(self) -> None:
        """Take those whose text is there."""
        if self._probs.is_legacy:
            self._legacy.append(self._probs.take())
        else:
            self._modern += map(_encode, self._probs.take()["content"])

    def object(self) -> dict[str, Any]:
        return joined(self._legacy) if self._probs.is_legacy else logprobs_object(EncodedArray(self._modern))
