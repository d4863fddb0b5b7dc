"""Writes a response as a stream of typed events, numbered from 0.

Source: OpenAI's API reference, "Streaming events" of Responses; `prompt_progress` and `timings` are llama-server's
(tools/server/server-task.cpp of llama.cpp). There is no `[DONE]`: the last event is `response.completed`,
`response.incomplete`, `response.failed` or `error`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.api.http.answers import EncodedArray, gathered, in_parts
from gateway.api.http.streaming import LongEvent, Written
from gateway.api.responses.output import CustomCall, FunctionCall, Message, Output, OutputItem, Snapshot, Thought
from gateway.api.responses.records import NewRecord
from gateway.api.responses.request import ResponseRequest
from gateway.api.shapes import progress_object, progress_timings, timings_object
from gateway.call import Call
from gateway.errors import PaddockError
from workers.protocol.events import CallEvent, Progress, Text, Timings, TimingsSoFar

_encode = msgspec.json.Encoder(enc_hook=EncodedArray.raw).encode

DELTAS = {
    Message: "response.output_text.delta",
    Thought: "response.reasoning_text.delta",
    FunctionCall: "response.function_call_arguments.delta",
    CustomCall: "response.custom_tool_call_input.delta",
}


class ItemEvents:
    """Writes the events of one response's items as they grow (a `gateway.api.responses.output.Listener`).

    It has no reference to the EventWriter: that would be a cycle, which only the garbage collector frees."""

    def __init__(self) -> None:
        self._num_events = 0
        self._parts: list[bytes] = []
        self._long: list[bytes | LongEvent] = []
        """Long events, and the events before each of them; sent before those in `_parts`. Empty: no event is long."""
        self._heads: dict[str, bytes] = {}
        """Id of an item -> the bytes with which all its delta events begin, encoded once."""
        self._delta_head = b""
        """The bytes with which delta events of the current message begin."""
        self._timings = b""
        """The field `timings` for the next delta event; empty: it has none."""

    def take(self) -> Written:
        """Return the events since the last call."""
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
        """Return an event that repeats a message's probabilities. `brief`: `fields`, but without long lists of them."""
        number = {"sequence_number": self._num_events}
        self._num_events += 1
        parts, few = (_event_parts(kind, {"type": kind, **one, **number}) for one in (fields, brief))
        return LongEvent(gathered(parts), few)

    def note_timings(self, timings: Timings) -> None:
        """Add the timings to the next delta event."""
        self._timings = b',"timings":' + _encode(timings_object(timings))

    def progressed(self, response: dict[str, Any], progress: Progress, *, timings: bool) -> None:
        """Add an event that says how much of the prompt is read; `timings`: it also says how long this took."""
        told: dict[str, Any] = {"response": response, "prompt_progress": progress_object(progress)}
        if timings:
            told["timings"] = progress_timings(progress)
        self._parts.append(self.event("response.in_progress", told))

    def delta(self, text: str, logprobs: list[bytes] | None = None) -> bytes:
        """Return a delta event: more text of the current message."""
        number = self._num_events
        self._num_events = number + 1
        head = self._delta_head + _encode(text)
        shown = b"[%b]" % b",".join(logprobs) if logprobs else b"[]"
        return head + b',"logprobs":%b,"sequence_number":%d%b}\n\n' % (shown, number, self._take_timings())

    def _take_timings(self) -> bytes:
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
        else:
            self._add_delta(item, text)

    def _add_delta(self, item: OutputItem, text: str) -> None:
        number = self._num_events
        self._num_events = number + 1
        head, timings = self._heads[item.id], self._take_timings()
        self._parts.append(b'%b%b,"sequence_number":%d%b}\n\n' % (head, _encode(text), number, timings))

    def closed(self, item: OutputItem, status: str) -> None:
        told: dict[str, Any]
        if isinstance(item, Message):
            self._close_message(item, status)
            return
        if isinstance(item, CustomCall):
            told = {**_place(item), "input": item.text}
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

    def _close_message(self, message: Message, status: str) -> None:
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
    """Return kind and fields of the events that end a message; each repeats the whole message."""
    place, item = _content(message), message.object(status, brief=brief)
    return [
        ("response.output_text.done", {**place, "text": message.text, "logprobs": message.told(brief=brief)}),
        ("response.content_part.done", {**place, "part": message.part(brief=brief)}),
        ("response.output_item.done", {"output_index": message.index, "item": item}),
    ]


def _event_parts(kind: str, document: dict[str, Any]) -> Iterator[bytes]:
    yield b"event: %b\ndata: " % kind.encode()
    yield from in_parts(document)
    yield b"\n\n"


def _place(item: OutputItem) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.index}


def _content(item: OutputItem) -> dict[str, Any]:
    return {**_place(item), "content_index": 0}


class EventWriter:
    """Writes one streamed response."""

    def __init__(self, asked: ResponseRequest, call: Call) -> None:
        self.snapshot = Snapshot(asked, call)
        self._items = ItemEvents()
        self._output = Output(asked.id, self._items, speaks=asked.generates, custom=asked.custom_tools)
        self._tells_timings = "timings" in asked.requests[0].tell
        self._told = self._begun = False

    def queued(self) -> bytes:
        """Return the first events of a response in the background: created, queued."""
        self._told = True
        told = {"response": self.snapshot.object("queued")}
        return self._items.event("response.created", told) + self._items.event("response.queued", told)

    def idle(self) -> bytes:
        """Return an event that keeps the connection alive: the response is queued, or in progress."""
        if not self._told:
            return self.queued()
        status = "in_progress" if self._begun else "queued"
        return self._items.event(f"response.{status}", {"response": self.snapshot.object(status)})

    def opening(self) -> bytes:
        begun = {"response": self.snapshot.object("in_progress")}
        created = b"" if self._told else self._items.event("response.created", begun)
        self._told = self._begun = True
        return created + self._items.event("response.in_progress", begun)

    def chunks(self, events: list[CallEvent], choice: int) -> Written:
        output = self._output
        if len(events) == 1:
            event = events[0]
            if type(event) is Text and isinstance(output.speaking, Message) and not output.has_waiting:
                output.speaking.texts.append(event.text)
                return self._items.delta(event.text)
        for event in events:
            match event:
                case TimingsSoFar():
                    self._items.note_timings(event.timings)
                case Progress():
                    self._items.progressed(self.snapshot.standing(), event, timings=self._tells_timings)
                case _:
                    output.add(event)
        return self._items.take()

    def closing(self) -> Written:
        document, brief = self.response(), self.response(brief=True)
        timings = {"timings": document["timings"]}
        return self._ending(document, brief, **timings)

    def broken(self, error: PaddockError) -> Written:
        if self._told:
            return self._ending(self.failed(error), self.failed(error, brief=True))
        # No event of a response was sent yet (the call waited for a slot): send an error, not a failed response.
        told = {"code": error.code or error.type, "message": error.message, "param": error.param}
        return self._items.event("error", told)

    def response(self, *, brief: bool = False) -> dict[str, Any]:
        """Return the object of a complete response; `brief` as in `Output.objects`."""
        output = self._output
        if output.end is None:
            raise ValueError("the answer has no end")
        return self.snapshot.ended(output.objects(brief=brief), output.end, output.num_reasoning_tokens)

    def failed(self, error: PaddockError, *, brief: bool = False) -> dict[str, Any]:
        return self.snapshot.failed(self._output.objects(brief=brief), error)

    def record(self, response: dict[str, Any]) -> NewRecord:
        asked = self.snapshot.asked
        return NewRecord(response=response, input=asked.to_keep, chain=asked.chain, is_background=asked.background)

    def stopped(self) -> dict[str, Any]:
        """Return the object of a cancelled response, with its output so far."""
        return self.snapshot.object("cancelled", self._output.objects(brief=True))

    def _ending(self, response: dict[str, Any], brief: dict[str, Any], **fields: Any) -> Written:
        """Return the last event, which repeats the whole response."""
        told, few = {"response": response, **fields}, {"response": brief, **fields}
        event = self._items.long_event(f"response.{response['status']}", told, few)
        return [event] if self._output.is_long else b"".join(event.parts)
