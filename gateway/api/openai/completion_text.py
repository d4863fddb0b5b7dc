"""What goes with a completion's text: the prompt before it, and the probabilities of its tokens in either shape."""

from __future__ import annotations

from typing import Any

from gateway.api.openai.completion_request import CompletionRequest
from gateway.api.openai.legacy_logprobs import LegacyCollector, joined
from gateway.api.openai.logprobs import LogprobsCollector, logprobs_object
from workers.protocol.events import Logprobs, Settings
from workers.protocol.requests import GenerateRequest


class Echo:
    """The prompt of one answer, where it is wanted. A text is told as it came; tokens are told as the worker reads."""

    def __init__(self, asked: CompletionRequest, number: int) -> None:
        prompt = asked.prompts[number * len(asked.prompts) // len(asked.requests)]
        self._text = prompt if asked.echo and isinstance(prompt, str) else ""
        self._by_worker = asked.echo and not isinstance(prompt, str)

    def at_start(self) -> str:
        return self._text

    def in_settings(self, event: Settings) -> str:
        return event.prompt if self._by_worker else ""


class Probabilities:
    """Of the tokens of one answer."""

    def __init__(self, asked: CompletionRequest, request: GenerateRequest) -> None:
        self.wanted = bool(request.n_probs)
        self._legacy = LegacyCollector()
        self._modern = LogprobsCollector(request.post_sampling_probs)
        self._is_legacy = asked.legacy_logprobs

    @property
    def waiting(self) -> bool:
        return bool(self._legacy) or bool(self._modern)

    def add(self, event: Logprobs) -> None:
        (self._legacy if self._is_legacy else self._modern).add(event)

    def take(self) -> dict[str, Any]:
        """Of all tokens that waited for their text."""
        return self._legacy.take() if self._is_legacy else logprobs_object(self._modern.take())

    def joined(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """What several `take`s gave, as one."""
        if self._is_legacy:
            return joined(parts)
        return logprobs_object([entry for part in parts for entry in part["content"]])
