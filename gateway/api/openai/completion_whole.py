"""Writes OpenAI's completions as one whole object.

Source of the shape: OpenAI's API reference, "The completion object"; `timings` and `tokens` are llama-server's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.api.openai.completion_request import CompletionRequest
from gateway.api.openai.completion_text import Echo, Probabilities, WholeProbabilities
from gateway.api.openai.ids import completion_id
from gateway.api.openai.verbose import Verbose
from gateway.api.openai.whole import Whole
from gateway.api.tallies import usage_object
from gateway.call import Call
from gateway.choices import usage_of
from gateway.telemetry.trail import Trail
from workers.protocol.events import (
    CallEvent,
    Finished,
    Logprobs,
    PromptLogprobs,
    Reasoning,
    Settings,
    Started,
    Text,
    Tokens,
)
from workers.protocol.requests import GenerateRequest


class CompletionWhole:
    """Collects all answers of one request from the events."""

    def __init__(self, asked: CompletionRequest, call: Call, trail: Trail) -> None:
        self._model = call.alias
        self._trail = trail
        self._num_prompts = len(asked.prompts)
        self._whole = Whole(
            [
                _Choice(
                    one,
                    Echo(asked, number),
                    Probabilities(asked, one),
                    Verbose(one, wanted=asked.verbose, stream=False),
                )
                for number, one in enumerate(asked.requests)
            ]
        )

    def add(self, events: list[CallEvent], choice: int) -> None:
        self._whole.add(events, choice)

    def parts(self) -> Iterator[bytes]:
        """Yield the `text_completion` object as JSON."""
        usage = usage_object(usage_of(self._whole.ends, self._num_prompts))
        return self._whole.written(completion_id(), "text_completion", self._model, usage, self._trail.fingerprint)


class _Choice:
    """Collects one of the answers."""

    def __init__(self, request: GenerateRequest, echo: Echo, probs: Probabilities, verbose: Verbose) -> None:
        self._verbose = verbose
        self._echo = echo
        self._probs = probs
        self._told = WholeProbabilities(probs)
        self._tokens: list[int] | None = [] if "tokens" in request.tell else None
        self._texts: list[str] = []
        self.end: Finished | None = None

    def add(self, event: CallEvent) -> None:
        match event:
            case Text() | Reasoning():
                self._texts.append(event.text)
                if self._probs.waiting:
                    self._told.add_waiting()
            case Started():
                self._texts.append(self._echo.started(event))
            case Settings():
                self._verbose.note(event)
                self._texts.append(self._echo.in_settings(event))
            case PromptLogprobs():
                self._texts.append(self._echo.probs(event, self._probs))
            case Logprobs():
                self._probs.add(event)
            case Tokens() if self._tokens is not None:
                self._tokens += event.tokens
            case Finished():
                self.end = event

    def verbose(self, end: Finished) -> dict[str, Any]:
        return self._verbose.fields(end)

    def object(self, number: int, end: Finished) -> dict[str, Any]:
        if self._probs.waiting_at_end:
            self._told.add_waiting()
        logprobs = self._told.object() if self._probs.wanted else None
        choice: dict[str, Any] = {"index": number, "text": "".join(self._texts), "logprobs": logprobs}
        choice["finish_reason"] = end.reason.value
        if self._tokens is not None:
            choice["tokens"] = self._tokens
        return choice
