"""Writes OpenAI's chat dialect from the canonical events: as chunks of a stream, or as one whole object.

Source of the shapes: OpenAI's API reference, "Chat completion object" and "chunk object"; `timings` has
llama-server's fields (tools/server/README.md of llama.cpp).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import msgspec

from gateway.api.openai.logprobs import LogprobsCollector, logprobs_object
from gateway.errors import PaddockError
from gateway.relay.failures import answer_to
from gateway.telemetry.trail import Trail
from workers.protocol.events import CallEvent, Failed, Finished, Logprobs, Text, Timings, ToolCallDelta, Usage

_encode = msgspec.json.Encoder().encode


def completion_id() -> str:
    return "chatcmpl-" + os.urandom(12).hex()


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def timings_object(timings: Timings) -> dict[str, Any]:
    return {
        "cache_n": timings.cache_n,
        "prompt_n": timings.prompt_n,
        "prompt_ms": timings.prompt_ms,
        **_rates("prompt", timings.prompt_n, timings.prompt_ms),
        "predicted_n": timings.predicted_n,
        "predicted_ms": timings.predicted_ms,
        **_rates("predicted", timings.predicted_n, timings.predicted_ms),
    }


def _rates(name: str, count: int, total_ms: float) -> dict[str, float]:
    return {
        f"{name}_per_token_ms": total_ms / count if count else 0.0,
        f"{name}_per_second": count * 1e3 / total_ms if total_ms > 0 else 0.0,
    }


class ChunkWriter:
    """The chunks of one streamed answer. What is the same in all of them is encoded once."""

    def __init__(self, model: str, include_usage: bool, trail: Trail, *, post_sampling: bool = False) -> None:
        self.failure: PaddockError | None = None
        """Why the answer broke off, if it did."""
        self._trail = trail
        self._include_usage = include_usage
        self._waits_for_first = True
        self._logprobs = LogprobsCollector(post_sampling)
        head = _encode(
            {
                "id": completion_id(),
                "object": "chat.completion.chunk",
                "created": int(time.time()),
                "model": model,
            }
        )
        self._head = b"data: " + head[:-1]
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._text_head = self._head + b',"choices":[{"index":0,"delta":{"content":'
        self._text_tail = b'},"logprobs":null,"finish_reason":null}]' + self._tail

    def opening(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def chunks(self, events: list[CallEvent]) -> bytes:
        """The chunks for these events in one piece; empty when they say nothing to the client."""
        if len(events) == 1:
            event = events[0]
            if type(event) is Text:
                return self._text(event)
        return b"".join([self._one(event) for event in events])

    def _one(self, event: CallEvent) -> bytes:
        match event:
            case Text():
                return self._text(event)
            case Logprobs():
                self._logprobs.add(event)
                return b""
            case ToolCallDelta():
                if self._waits_for_first:
                    self._note_first()
                return self._chunk({"tool_calls": [_tool_call_delta(event)]}, None)
            case Finished():
                return self._closing(event)
            case Failed():
                self.failure = answer_to(event.failure)
                return b""
            case _:
                return b""

    def _text(self, event: Text) -> bytes:
        if self._waits_for_first:
            self._note_first()
        if self._logprobs:
            return self._chunk({"content": event.text}, None)
        return self._text_head + _encode(event.text) + self._text_tail

    def _closing(self, event: Finished) -> bytes:
        self._trail.usage = event.usage
        timings = b',"timings":' + _encode(timings_object(event.timings))
        if not self._include_usage:
            return self._chunk({}, event.reason.value, timings)
        usage = b',"choices":[],"usage":' + _encode(usage_object(event.usage))
        return self._chunk({}, event.reason.value) + self._head + usage + timings + b"}\n\n"

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None, extra: bytes = b"") -> bytes:
        # What is left at the end became no text: the end token, a stop string.
        logprobs = logprobs_object(self._logprobs.take()) if self._logprobs and finish_reason is None else None
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._head + b',"choices":[' + _encode(choice) + b"]" + extra + self._tail

    def _note_first(self) -> None:
        self._waits_for_first = False
        self._trail.first_token_at = monotonic()


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class WholeWriter:
    """One whole answer, collected from the events."""

    def __init__(self, model: str, trail: Trail, *, n_probs: int = 0, post_sampling: bool = False) -> None:
        self._model = model
        self._logprobs = LogprobsCollector(post_sampling)
        self._content: list[dict[str, Any]] | None = [] if n_probs else None
        self._trail = trail
        self._texts: list[str] = []
        self._calls: dict[int, _Call] = {}
        self._end: Finished | None = None

    def add(self, events: list[CallEvent]) -> None:
        """Raises PaddockError when the call failed."""
        for event in events:
            match event:
                case Text():
                    self._texts.append(event.text)
                case ToolCallDelta():
                    call = self._calls.setdefault(event.index, _Call(event.id, event.name))
                    call.arguments.append(event.arguments)
                case Logprobs():
                    self._logprobs.add(event)
                case Failed():
                    raise answer_to(event.failure)
                case Finished():
                    self._end = event
                    self._trail.usage = event.usage
            if isinstance(event, Text | ToolCallDelta):
                if self._trail.first_token_at is None:
                    self._trail.first_token_at = monotonic()
                if self._content is not None:
                    self._content += self._logprobs.take()

    def body(self) -> bytes:
        """The `chat.completion` object; the call must have finished."""
        end = self._end
        if end is None:
            raise ValueError("the answer has no end")
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts), "refusal": None}
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.arguments)},
                }
                for _, call in sorted(self._calls.items())
            ]
        logprobs = None if self._content is None else logprobs_object(self._content)
        choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": end.reason.value}
        return _encode(
            {
                "id": completion_id(),
                "object": "chat.completion",
                "created": int(time.time()),
                "model": self._model,
                "choices": [choice],
                "usage": usage_object(end.usage),
                "timings": timings_object(end.timings),
            }
        )


def _tool_call_delta(event: ToolCallDelta) -> dict[str, Any]:
    """The first delta of a call names it; the later ones carry arguments only."""
    if event.id or event.name:
        function = {"name": event.name, "arguments": event.arguments}
        return {"index": event.index, "id": event.id, "type": "function", "function": function}
    return {"index": event.index, "function": {"arguments": event.arguments}}
