"""Writes OpenAI's completions as one whole object.

Source of the shape: OpenAI's API reference, "The completion object"; `timings` and `tokens` are llama-server's.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from gateway.api.openai.completion_request import CompletionRequest
from gateway.api.openai.completion_text import Echo, Probabilities
from gateway.api.openai.ids import completion_id
from gateway.api.tallies import timings_object, usage_object
from gateway.call import Call
from gateway.choices import usage_of
from workers.protocol.events import CallEvent, Finished, Logprobs, Reasoning, Settings, Text, Tokens
from workers.protocol.requests import GenerateRequest

_encode = msgspec.json.Encoder().encode


class CompletionWhole:
    """All answers of one request, collected from the events."""

    def __init__(self, asked: CompletionRequest, call: Call) -> None:
        self._model = call.alias
        self._num_prompts = len(asked.prompts)
        self._choices = [
            _Choice(one, Echo(asked, number), Probabilities(asked, one)) for number, one in enumerate(asked.requests)
        ]

    def add(self, events: list[CallEvent], choice: int) -> None:
        collected = self._choices[choice]
        for event in events:
            collected.add(event)

    def body(self) -> bytes:
        """The `text_completion` object."""
        ends = [choice.ended for choice in self._choices]
        choices = [choice.object(number) for number, choice in enumerate(self._choices)]
        if len(ends) > 1:
            for choice, end in zip(choices, ends, strict=True):
                choice["timings"] = timings_object(end.timings)
        return _encode(
            {
                "id": completion_id(),
                "object": "text_completion",
                "created": int(time.time()),
                "model": self._model,
                "choices": choices,
                "usage": usage_object(usage_of(ends, self._num_prompts)),
                "timings": timings_object(ends[0].timings),
            }
        )


class _Choice:
    """One of the answers."""

    def __init__(self, request: GenerateRequest, echo: Echo, probs: Probabilities) -> None:
        self._echo = echo
        self._probs = probs
        self._told: list[dict[str, Any]] = []
        self._tokens: list[int] | None = [] if "tokens" in request.tell else None
        self._texts = [echo.at_start()]
        self._end: Finished | None = None

    @property
    def ended(self) -> Finished:
        if self._end is None:
            raise ValueError("the answer has no end")
        return self._end

    def add(self, event: CallEvent) -> None:
        match event:
            case Text() | Reasoning():
                self._texts.append(event.text)
                if self._probs.waiting:
                    self._told.append(self._probs.take())
            case Settings():
                self._texts.append(self._echo.in_settings(event))
            case Logprobs():
                self._probs.add(event)
            case Tokens() if self._tokens is not None:
                self._tokens += event.tokens
            case Finished():
                self._end = event

    def object(self, number: int) -> dict[str, Any]:
        logprobs = self._probs.joined(self._told) if self._probs.wanted else None
        choice: dict[str, Any] = {"index": number, "text": "".join(self._texts), "logprobs": logprobs}
        choice["finish_reason"] = self.ended.reason.value
        if self._tokens is not None:
            choice["tokens"] = self._tokens
        return choice
