"""Writes OpenAI's chat dialect as one whole object.

Source of the shape: OpenAI's API reference, "chat completion object"; `reasoning_content` and `timings` are
llama-server's (tools/server/README.md of llama.cpp).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.api.openai.chat_request import ChatRequest
from gateway.api.openai.ids import completion_id
from gateway.api.openai.logprobs import LogprobsCollector, logprobs_object
from gateway.api.tallies import timings_object, usage_object
from gateway.call import Call
from gateway.choices import usage_of
from workers.protocol.events import CallEvent, Finished, Logprobs, Reasoning, Text, ToolCallDelta

_encode = msgspec.json.Encoder().encode


class WholeWriter:
    """One whole answer, collected from the events."""

    def __init__(self, asked: ChatRequest, call: Call) -> None:
        self._model = call.alias
        self._choices = [_Choice(bool(one.n_probs), one.post_sampling_probs) for one in asked.requests]

    def add(self, events: list[CallEvent], choice: int) -> None:
        collected = self._choices[choice]
        for event in events:
            collected.add(event)

    def body(self) -> bytes:
        """The `chat.completion` object."""
        ends = [choice.ended for choice in self._choices]
        return _encode(
            {
                "id": completion_id(),
                "object": "chat.completion",
                "created": int(time.time()),
                "model": self._model,
                "choices": [choice.object(number) for number, choice in enumerate(self._choices)],
                "usage": usage_object(usage_of(ends, 1)),
                "timings": timings_object(ends[-1].timings),
            }
        )


@dataclass(slots=True)
class _ToolCall:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def object(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class _Choice:
    """One of the answers."""

    def __init__(self, with_logprobs: bool, post_sampling: bool) -> None:
        self._logprobs = LogprobsCollector(post_sampling)
        self._content: list[dict[str, Any]] | None = [] if with_logprobs else None
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: dict[int, _ToolCall] = {}
        self._end: Finished | None = None

    @property
    def ended(self) -> Finished:
        if self._end is None:
            raise ValueError("the answer has no end")
        return self._end

    def add(self, event: CallEvent) -> None:
        match event:
            case Text():
                self._texts.append(event.text)
            case Reasoning():
                self._thoughts.append(event.text)
            case ToolCallDelta():
                call = self._calls.setdefault(event.index, _ToolCall(event.id, event.name))
                call.arguments.append(event.arguments)
            case Logprobs():
                self._logprobs.add(event)
            case Finished():
                self._end = event
        if self._content is not None and isinstance(event, Text | Reasoning | ToolCallDelta):
            self._content += self._logprobs.take()

    def object(self, number: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts), "refusal": None}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [call.object() for _, call in sorted(self._calls.items())]
        logprobs = None if self._content is None else logprobs_object(self._content)
        return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": self.ended.reason.value}
