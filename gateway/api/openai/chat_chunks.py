"""Writes OpenAI's chat dialect as the chunks of a stream.

Source of the shapes: OpenAI's API reference, "chat completion chunk object"; `reasoning_content` and `timings` are
llama-server's (tools/server/README.md of llama.cpp).
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from gateway.api.openai.chat_request import ChatRequest
from gateway.api.openai.error_shape import error_body
from gateway.api.openai.ids import completion_id
from gateway.api.openai.logprobs import LogprobsCollector, logprobs_object
from gateway.api.streaming import DONE, data
from gateway.api.tallies import timings_object, usage_object
from gateway.call import Call
from gateway.choices import usage_of
from gateway.errors import PaddockError
from workers.protocol.events import CallEvent, Finished, Logprobs, Reasoning, Text, Timings, ToolCallDelta

_encode = msgspec.json.Encoder().encode


class ChunkWriter:
    """The chunks of one streamed answer. What is the same in all of them is encoded once."""

    def __init__(self, asked: ChatRequest, call: Call) -> None:
        self._asked = asked
        head = _encode(
            {
                "id": completion_id(),
                "object": "chat.completion.chunk",
                "created": int(time.time()),
                "model": call.alias,
            }
        )
        self._head = b"data: " + head[:-1]
        self._tail = b',"usage":null}\n\n' if asked.include_usage else b"}\n\n"
        self._choices = [_Choice(self, number) for number in range(len(asked.requests))]
        self._ends: list[Finished | None] = [None] * len(asked.requests)
        self._timings: Timings | None = None

    def opening(self) -> bytes:
        return b"".join([choice.chunk({"role": "assistant", "content": ""}, None) for choice in self._choices])

    def chunks(self, events: list[CallEvent], choice: int) -> bytes:
        """The chunks for these events in one piece; empty when they say nothing to the client."""
        writer = self._choices[choice]
        if len(events) == 1:
            event = events[0]
            if type(event) is Text:
                return writer.text(event)
        return b"".join([writer.one(event) for event in events])

    def closing(self) -> bytes:
        if not self._asked.include_usage:
            return DONE
        ends = [end for end in self._ends if end is not None]
        usage = _encode(usage_object(usage_of(ends, 1)))
        timings = b',"timings":' + _encode(timings_object(ends[-1].timings))
        return self._head + b',"choices":[],"usage":' + usage + timings + b"}\n\n" + DONE

    def broken(self, error: PaddockError) -> bytes:
        return data(error_body(error)) + DONE

    def wrapped(self, choice: dict[str, Any], extra: bytes = b"") -> bytes:
        return self._head + b',"choices":[' + _encode(choice) + b"]" + extra + self._tail

    def framed(self, number: int) -> tuple[bytes, bytes]:
        """What stands before and after the text of a plain chunk."""
        head = self._head + b',"choices":[{"index":%d,"delta":{"content":' % number
        return head, b'},"logprobs":null,"finish_reason":null}]' + self._tail

    def end(self, number: int, event: Finished) -> bytes:
        """Remembers it for the last chunk; returns what belongs into the present one."""
        self._ends[number] = event
        return b"" if self._asked.include_usage else b',"timings":' + _encode(timings_object(event.timings))

    def new_collector(self) -> LogprobsCollector:
        return LogprobsCollector(self._asked.requests[0].post_sampling_probs)


class _Choice:
    """The chunks of one of the answers."""

    def __init__(self, stream: ChunkWriter, number: int) -> None:
        self._stream = stream
        self._number = number
        self._logprobs = stream.new_collector()
        self._text_head, self._text_tail = stream.framed(number)

    def one(self, event: CallEvent) -> bytes:
        match event:
            case Text():
                return self.text(event)
            case Reasoning():
                return self.chunk({"reasoning_content": event.text}, None)
            case Logprobs():
                self._logprobs.add(event)
                return b""
            case ToolCallDelta():
                return self.chunk({"tool_calls": [_tool_call_delta(event)]}, None)
            case Finished():
                return self.chunk({}, event.reason.value, self._stream.end(self._number, event))
            case _:
                return b""

    def text(self, event: Text) -> bytes:
        if self._logprobs:
            return self.chunk({"content": event.text}, None)
        return self._text_head + _encode(event.text) + self._text_tail

    def chunk(self, delta: dict[str, Any], finish_reason: str | None, extra: bytes = b"") -> bytes:
        # What is left at the end became no text: the end token, a stop string.
        logprobs = logprobs_object(self._logprobs.take()) if self._logprobs and finish_reason is None else None
        choice = {"index": self._number, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._stream.wrapped(choice, extra)


def _tool_call_delta(event: ToolCallDelta) -> dict[str, Any]:
    """The first delta of a call names it; the later ones carry arguments only."""
    if event.id or event.name:
        function = {"name": event.name, "arguments": event.arguments}
        return {"index": event.index, "id": event.id, "type": "function", "function": function}
    return {"index": event.index, "function": {"arguments": event.arguments}}
