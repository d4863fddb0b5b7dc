"""Writes the events of a response's items as they grow, and numbers all events from 0.

Source of the shapes: OpenAI's API reference, "Streaming events" of Responses; `prompt_progress` and `timings` are
llama-server's (tools/server/server-task.cpp of llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.api.answers import EncodedArray, gathered, in_parts
from gateway.api.responses.output import CustomCall, FunctionCall, Message, OutputItem, Thought
from gateway.api.streaming import LongEvent, Written
from gateway.api.tallies import progress_object, progress_timings, timings_object
from workers.protocol.events import Progress, Timings

_encode = msgspec.json.Encoder(enc_hook=EncodedArray.raw).encode

DELTAS = {
    Message: "response.output_text.delta",
    Thought: "response.reasoning_text.delta",
    FunctionCall: "response.function_call_arguments.delta",
    CustomCall: "response.custom_tool_call_input.delta",
}


class ItemEvents:
    """Listens to one response's items (`gateway.api.responses.output.Listener`). It does not refer to the stream's
    writer: both would be garbage that only the collector of cycles finds."""

    def __init__(self) -> None:
        self._num_events = 0
        self._parts: list[bytes] = []
        self._long: list[bytes | LongEvent] = []
        """Events before these parts, where one of them is long."""
        self._heads: dict[str, bytes] = {}
        """Id of an item -> the bytes that all of its deltas begin with, encoded once."""
        self._delta_head = b""
        """The beginning of deltas of the message that grows."""
        self._timings = b""
        """The times so far, which the next delta tells."""

    def take(self) -> Written:
        """Return the events since the last time."""
        parts, self._parts = self._parts, []
        if not self._long:
            return b"".join(parts)
        long, self._long = self._long, []
        return [*long, b"".join(parts)] if parts else long

    def event(self, kind: str, fields: dict[str, Any]) -> bytes:
        body = _encode({"type": kind, **fields, "sequence_number": self._num_events})
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), body)

    def long_event(self, kind: str, fields: dict[str, Any], brief: dict[str, Any]) -> LongEvent:
        """Return an event that repeats probabilities; `brief`: its fields for where it has to be in one piece."""
        number = {"sequence_number": self._num_events}
        self._num_events += 1
        parts, few = (_written(kind, {"type": kind, **one, **number}) for one in (fields, brief))
        return LongEvent(gathered(parts), few)

    def note_timings(self, timings: Timings) -> None:
        """Let the next delta tell the timings."""
        self._timings = b',"timings":' + _encode(timings_object(timings))

    def progressed(self, response: dict[str, Any], progress: Progress, *, timings: bool) -> None:
        """Tell how much of the prompt is read; `timings`: also what that took."""
        told: dict[str, Any] = {"response": response, "prompt_progress": progress_object(progress)}
        if timings:
            told["timings"] = progress_timings(progress)
        self._parts.append(self.event("response.in_progress", told))

    def delta(self, text: str, logprobs: list[bytes] | None = None) -> bytes:
        """Return an event with more of the message that grows."""
        number = self._num_events
        self._num_events = number + 1
        head = self._delta_head + _encode(text)
        shown = b"[%b]" % b",".join(logprobs) if logprobs else b"[]"
        return head + b',"logprobs":%b,"sequence_number":%d%b}\n\n' % (shown, number, self._taken_timings())

    def _taken_timings(self) -> bytes:
        timings, self._timings = self._timings, b""
        return timings

    def opened(self, item: OutputItem) -> None:
        place = {"output_index": item.index, "item": item.object("in_progress")}
        self._parts.append(self.event("response.output_item.added", place))
        if isinstance(item, Message | Thought):
            self._parts.append(self.event("response.content_part.added", {**_content(item), "part": item.part()}))
        place = _place(item) if isinstance(item, FunctionCall) else _content(item)
        kind = DELTAS[type(item)]
        head = _encode({"type": kind, **place})[:-1]
        self._heads[item.id] = b'event: %b\ndata: %b,"delta":' % (kind.encode(), head)
        if isinstance(item, Message):
            self._delta_head = self._heads[item.id]

    def grew(self, item: OutputItem, text: str, logprobs: list[bytes]) -> None:
        if isinstance(item, Message):
            self._parts.append(self.delta(text, logprobs))
        elif not isinstance(item, CustomCall):  # whose input is known at its end
            self._grew(item, text)

    def _grew(self, item: OutputItem, text: str) -> None:
        number = self._num_events
        self._num_events = number + 1
        head, timings = self._heads[item.id], self._taken_timings()
        self._parts.append(b'%b%b,"sequence_number":%d%b}\n\n' % (head, _encode(text), number, timings))

    def closed(self, item: OutputItem, status: str) -> None:
        told: dict[str, Any]
        if isinstance(item, Message):
            self._closed(item, status)
            return
        if isinstance(item, CustomCall):
            self._grew(item, item.input)
            told = {**_place(item), "input": item.input}
            self._parts.append(self.event("response.custom_tool_call_input.done", told))
        elif isinstance(item, FunctionCall):
            told = {**_place(item), "name": item.name, "arguments": item.text}
            self._parts.append(self.event("response.function_call_arguments.done", told))
        else:
            told = {**_content(item), "text": item.text}
            self._parts.append(self.event("response.reasoning_text.done", told))
            self._parts.append(self.event("response.content_part.done", {**_content(item), "part": item.part()}))
        place = {"output_index": item.index, "item": item.object(status)}
        self._parts.append(self.event("response.output_item.done", place))

    def _closed(self, message: Message, status: str) -> None:
        ends, brief = _ends(message, status), _ends(message, status, brief=True)
        for (kind, fields), (_, few) in zip(ends, brief, strict=True):
            event = self.long_event(kind, fields, few)
            if not message.is_long:
                self._parts.append(b"".join(event.parts))
                continue
            if self._parts:
                self._long.append(b"".join(self._parts))
                self._parts = []
            self._long.append(event)


def _ends(message: Message, status: str, *, brief: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of a message's end: their kinds and fields, each with all of the message once more."""
    place, item = _content(message), message.object(status, brief=brief)
    return [
        ("response.output_text.done", {**place, "text": message.text, "logprobs": message.told(brief=brief)}),
        ("response.content_part.done", {**place, "part": message.part(brief=brief)}),
        ("response.output_item.done", {"output_index": message.index, "item": item}),
    ]


def _written(kind: str, document: dict[str, Any]) -> Iterator[bytes]:
    yield b"event: %b\ndata: " % kind.encode()
    yield from in_parts(document)
    yield b"\n\n"


def _place(item: OutputItem) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.index}


def _content(item: OutputItem) -> dict[str, Any]:
    return {**_place(item), "content_index": 0}
