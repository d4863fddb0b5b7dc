"""Reads Anthropic's messages (module `request`), and writes the answer, whole or as a stream of typed events.

Sources: Anthropic's API reference, "Create a Message" and "Streaming messages".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import msgspec
from pydantic_core import from_json
from starlette.types import Scope

from gateway.api.anthropic.error_shape import error_body
from gateway.api.anthropic.request import MessagesRequest, read_messages_request
from gateway.api.http.answers import JSON, in_parts
from gateway.api.http.diagnostics import ignored_of
from gateway.api.intake.intake import attachments_of
from gateway.call import Call
from gateway.errors import PaddockError
from gateway.telemetry.request_log import RequestLog
from workers.protocol.events import CallEvent, Finished, FinishReason, Reasoning, Started, Text, ToolCallDelta, Usage

REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}


def message_id() -> str:
    return "msg_" + os.urandom(12).hex()


def stop_reason(end: Finished) -> str:
    return "stop_sequence" if end.stop is not None else REASONS[end.reason]


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return Anthropic's `usage`, whose `input_tokens` are only those that were not cached."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


_encode = msgspec.json.Encoder().encode

NO_BLOCK = ("", -1)
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class StreamWriter:
    """Writes one streamed message: its blocks in turn, each between a start event and a stop event.

    The part that all deltas of a block share is encoded once."""

    def __init__(self, call: Call, request_log: RequestLog) -> None:
        self._model = call.alias
        self._request_log = request_log
        self._begun = False
        self._block: tuple[str, int] = NO_BLOCK
        """Kind of the open block, and the number of its tool call (0 for other kinds)."""
        self._index = -1
        self._delta_head = b""
        self._delta_tail = b"}}\n\n"
        self._end: Finished | None = None

    def opening(self) -> bytes:
        return b""  # the message begins with the size of its prompt, which comes with the first event

    def chunks(self, events: list[CallEvent], choice: int) -> bytes:
        if len(events) == 1:
            event, kind = events[0], self._block[0]
            if (type(event) is Text and kind == "text") or (type(event) is Reasoning and kind == "thinking"):
                return self._delta_head + _encode(event.text) + self._delta_tail
        return b"".join([self._one(event) for event in events])

    def closing(self) -> bytes:
        end = self._end
        if end is None:
            raise ValueError("the answer has no end")
        delta = {
            "type": "message_delta",
            "delta": {"stop_reason": stop_reason(end), "stop_sequence": end.stop},
            "usage": usage_object(end.usage),
        }
        return self._close_block() + _event("message_delta", delta) + _event("message_stop", {"type": "message_stop"})

    def idle(self) -> bytes:
        return PING

    def broken(self, error: PaddockError) -> bytes:
        return b"event: error\ndata: %b\n\n" % error_body(error, self._request_log)

    def _one(self, event: CallEvent) -> bytes:
        match event:
            case Started():
                return self._start(event.usage)
            case Text():
                return self._in_block(("text", 0), {"type": "text", "text": ""}, event.text)
            case Reasoning():
                block: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
                return self._in_block(("thinking", 0), block, event.text)
            case ToolCallDelta():
                block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                return self._in_block(("tool_use", event.index), block, event.arguments)
            case Finished():
                self._end = event
                return b"" if self._begun else self._start(event.usage.of_prompt)
            case _:
                return b""

    def _start(self, usage: Usage) -> bytes:
        self._begun = True
        message: dict[str, Any] = {
            "id": message_id(),
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_object(usage),
        }
        return _event("message_start", {"type": "message_start", "message": message})

    def _in_block(self, key: tuple[str, int], block: dict[str, Any], text: str) -> bytes:
        """Return a delta of block `key`. If `key` is not open, first close the open block, if any, and open `key`."""
        begun = b""
        if key != self._block:
            begun = self._close_block() + self._open_block(key, block)
        return begun + (self._delta_head + _encode(text) + self._delta_tail if text else b"")

    def _open_block(self, key: tuple[str, int], block: dict[str, Any]) -> bytes:
        self._block = key
        self._index += 1
        kind, field = DELTAS[key[0]]
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
        self._delta_head = head % (self._index, kind, field)
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return _event("content_block_start", start)

    def _close_block(self) -> bytes:
        if self._block is NO_BLOCK:
            return b""
        self._block = NO_BLOCK
        return _event("content_block_stop", {"type": "content_block_stop", "index": self._index})


DELTAS = {
    "text": (b"text_delta", b"text"),
    "thinking": (b"thinking_delta", b"thinking"),
    "tool_use": (b"input_json_delta", b"partial_json"),
}
"""Kind of block -> type of its deltas, and the name of the field with their text."""


def _event(name: str, document: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(document))


class WholeWriter:
    """Collects one whole message from the events: its blocks in the order in which they began."""

    content_type = JSON

    def __init__(self, call: Call) -> None:
        self._model = call.alias
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []
        """Pieces of each block's text, joined at the end: adding piece by piece copies a long text each time."""
        self._calls: dict[int, tuple[dict[str, Any], list[str]]] = {}
        self._end: Finished | None = None

    def add(self, events: list[CallEvent], choice: int) -> None:
        for event in events:
            match event:
                case Text():
                    self._add_to("text", event.text)
                case Reasoning():
                    self._add_to("thinking", event.text)
                case ToolCallDelta():
                    self._call(event)[1].append(event.arguments)
                case Finished():
                    self._end = event

    def parts(self) -> Iterator[bytes]:
        """Yield the message's JSON in parts. Call it when the answer has ended."""
        end = self._end
        if end is None:
            raise ValueError("the answer has no end")
        for block, texts in zip(self._blocks, self._texts, strict=True):
            if texts:
                block[block["type"]] = "".join(texts)
        for block, arguments in self._calls.values():
            block["input"] = _object("".join(arguments))
        return in_parts(
            {
                "id": message_id(),
                "type": "message",
                "role": "assistant",
                "model": self._model,
                "content": self._blocks,
                "stop_reason": stop_reason(end),
                "stop_sequence": end.stop,
                "usage": usage_object(end.usage),
            }
        )

    def _add_to(self, kind: str, text: str) -> None:
        """Add text to the last block if it is of this kind, otherwise to a new one. `kind`: `text` or `thinking`."""
        if not self._blocks or self._blocks[-1]["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            self._begin({"type": kind, kind: "", **signature})
        self._texts[-1].append(text)

    def _begin(self, block: dict[str, Any]) -> None:
        self._blocks.append(block)
        self._texts.append([])

    def _call(self, event: ToolCallDelta) -> tuple[dict[str, Any], list[str]]:
        known = self._calls.get(event.index)
        if known is None:
            block: dict[str, Any] = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
            self._begin(block)
            known = self._calls[event.index] = (block, [])
        return known


def _object(arguments: str) -> dict[str, Any]:
    """Parse the arguments. If their JSON was cut off, return the part that came; if it is no object, an empty dict."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class MessagesDialect:
    """Reads and writes `POST /v1/messages`."""

    def read(self, raw: bytes, scope: Scope) -> MessagesRequest:
        return read_messages_request(raw, ignored_of(scope), attachments_of(scope))

    def stream_writer(self, asked: MessagesRequest, call: Call, request_log: RequestLog) -> StreamWriter:
        return StreamWriter(call, request_log)

    def whole_writer(self, asked: MessagesRequest, call: Call, request_log: RequestLog) -> WholeWriter:
        return WholeWriter(call)
