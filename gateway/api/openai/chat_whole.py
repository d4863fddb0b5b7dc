"""Writes OpenAI's chat dialect as one whole object.

Source of the shape: OpenAI's API reference, "chat completion object"; `reasoning_content`, `timings` and `tokens` are
llama-server's (tools/server/README.md of llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.api.http.answers import EncodedArray
from gateway.api.openai.chat_chunks import finish_reason
from gateway.api.openai.logprobs import LogprobsCollector, logprobs_object
from gateway.api.openai.requests import ChatRequest
from gateway.api.openai.writing import Verbose, Whole, chat_id
from gateway.api.shapes import usage_object
from gateway.call import Call
from gateway.dispatch.fan_out import usage_of
from gateway.telemetry.trail import Trail
from workers.protocol.events import CallEvent, Finished, Logprobs, Reasoning, Settings, Text, Tokens, ToolCallDelta
from workers.protocol.requests import GenerateRequest

_encode = msgspec.json.Encoder().encode


class WholeWriter:
    """Collects one whole answer from the events."""

    def __init__(self, asked: ChatRequest, call: Call, trail: Trail) -> None:
        self._model = call.alias
        self._trail = trail
        self._whole = Whole(
            [
                _Choice(one, Verbose(one, wanted=asked.verbose, stream=False), as_function=asked.as_function)
                for one in asked.requests
            ]
        )

    def add(self, events: list[CallEvent], choice: int) -> None:
        self._whole.add(events, choice)

    def parts(self) -> Iterator[bytes]:
        """Yield the `chat.completion` object as JSON."""
        num_thought = sum(choice.num_thought for choice in self._whole.choices)
        usage = usage_object(usage_of(self._whole.ends, 1), num_thought)
        return self._whole.written(chat_id(), "chat.completion", self._model, usage, self._trail.fingerprint)


@dataclass(slots=True)
class _ToolCall:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def function(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": "".join(self.arguments)}

    def object(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": self.function()}


class _Choice:
    """Collects one of the answers."""

    def __init__(self, request: GenerateRequest, verbose: Verbose, *, as_function: bool) -> None:
        self.num_thought = 0
        self._verbose = verbose
        self._as_function = as_function
        self._logprobs = LogprobsCollector(request.post_sampling_probs)
        self._content: list[bytes] | None = [] if request.n_probs else None
        """The probabilities, encoded as they come: all of them encoded at the end held up other streams."""
        self._tokens: list[int] | None = [] if "tokens" in request.tell else None
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: dict[int, _ToolCall] = {}
        self.end: Finished | None = None

    def add(self, event: CallEvent) -> None:
        match event:
            case Text():
                self._texts.append(event.text)
            case Reasoning():
                self._thoughts.append(event.text)
                self.num_thought += event.num_tokens
            case ToolCallDelta():
                call = self._calls.setdefault(event.index, _ToolCall(event.id, event.name))
                call.arguments.append(event.arguments)
            case Settings():
                self._verbose.note(event)
            case Logprobs():
                self._logprobs.add(event)
            case Tokens() if self._tokens is not None:
                self._tokens += event.tokens
            case Finished():
                self.end = event
        if self._content is not None and isinstance(event, Text | Reasoning | ToolCallDelta):
            self._content += map(_encode, self._logprobs.take())

    def verbose(self, end: Finished) -> dict[str, Any]:
        return self._verbose.fields(end)

    def object(self, number: int, end: Finished) -> dict[str, Any]:
        content = None if self._content is None else EncodedArray(self._content)
        logprobs = None if content is None else logprobs_object(content)
        reason = finish_reason(end, as_function=self._as_function)
        choice = {"index": number, "message": self._message(), "logprobs": logprobs, "finish_reason": reason}
        if self._tokens is not None:
            choice["tokens"] = self._tokens
        return choice

    def _message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts), "refusal": None}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            calls = [call for _, call in sorted(self._calls.items())]
            message["content"] = message["content"] or None
            if self._as_function:
                message["function_call"] = calls[0].function()
            else:
                message["tool_calls"] = [call.object() for call in calls]
        return message
