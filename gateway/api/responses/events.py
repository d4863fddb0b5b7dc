"""Writes a response as a stream of typed events, numbered from 0.

Source of the shapes: OpenAI's API reference, "Streaming events" of Responses. There is no `[DONE]`: the last event is
`response.completed`, `response.incomplete`, `response.failed` or `error`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.api.responses.output import FunctionCall, Message, Output, OutputItem, Thought
from gateway.api.responses.records import Record
from gateway.api.responses.request import ResponseRequest
from gateway.api.responses.snapshot import Snapshot
from gateway.call import Call
from gateway.errors import PaddockError
from workers.protocol.events import CallEvent, Text

_encode = msgspec.json.Encoder().encode

DELTAS = {
    Message: "response.output_text.delta",
    Thought: "response.reasoning_text.delta",
    FunctionCall: "response.function_call_arguments.delta",
}


class EventWriter:
    """One streamed response."""

    def __init__(self, asked: ResponseRequest, call: Call) -> None:
        self.snapshot = Snapshot(asked, call)
        self._output = Output(asked.id, self, speaks=asked.generates)
        self._told = False
        self._num_events = 0
        self._parts: list[bytes] = []
        self._heads: dict[str, bytes] = {}
        """Id of an item -> what is the same in all of its deltas, encoded once."""
        self._delta_head = b""
        """That of the message that grows."""

    def queued(self) -> bytes:
        """In place of the opening's beginning, where the caller does not wait for the answer."""
        self._told = True
        told = {"response": self.snapshot.object("queued")}
        return self._event("response.created", told) + self._event("response.queued", told)

    def opening(self) -> bytes:
        begun = {"response": self.snapshot.object("in_progress")}
        created = b"" if self._told else self._event("response.created", begun)
        self._told = True
        return created + self._event("response.in_progress", begun)

    def chunks(self, events: list[CallEvent], choice: int) -> bytes:
        output = self._output
        if len(events) == 1:
            event = events[0]
            if type(event) is Text and isinstance(output.speaking, Message) and not output.has_waiting:
                output.speaking.texts.append(event.text)
                return self._delta(event.text)
        for event in events:
            output.add(event)
        parts, self._parts = self._parts, []
        return b"".join(parts)

    def closing(self) -> bytes:
        document = self.response()
        return self._event(f"response.{document['status']}", {"response": document})

    def broken(self, error: PaddockError) -> bytes:
        if self._told:
            return self._event("response.failed", {"response": self.failed(error)})
        # Nothing was said of a response yet: whoever waited for a slot learns why there is none.
        told = {"code": error.code or error.type, "message": error.message, "param": error.param}
        return self._event("error", told)

    def response(self) -> dict[str, Any]:
        """Of an answer that is complete."""
        output = self._output
        if output.end is None:
            raise ValueError("the answer has no end")
        return self.snapshot.ended(output.objects(), output.end, output.num_reasoning_tokens)

    def failed(self, error: PaddockError) -> dict[str, Any]:
        return self.snapshot.failed(self._output.objects(), error)

    def record(self, response: dict[str, Any]) -> Record:
        asked = self.snapshot.asked
        return Record(response=response, input=asked.input, chain=asked.chain, is_background=asked.background)

    def stopped(self) -> dict[str, Any]:
        """Of an answer that was cancelled."""
        return self.snapshot.object("cancelled", self._output.objects())

    def opened(self, item: OutputItem) -> None:
        place = {"output_index": item.index, "item": item.object("in_progress")}
        self._parts.append(self._event("response.output_item.added", place))
        if isinstance(item, Message | Thought):
            self._parts.append(self._event("response.content_part.added", {**_content(item), "part": item.part()}))
        place = _place(item) if isinstance(item, FunctionCall) else _content(item)
        kind = DELTAS[type(item)]
        head = _encode({"type": kind, **place})[:-1]
        self._heads[item.id] = b'event: %b\ndata: %b,"delta":' % (kind.encode(), head)
        if isinstance(item, Message):
            self._delta_head = self._heads[item.id]

    def grew(self, item: OutputItem, text: str, logprobs: list[dict[str, Any]]) -> None:
        if isinstance(item, Message):
            self._parts.append(self._delta(text, logprobs))
            return
        number = self._num_events
        self._num_events = number + 1
        self._parts.append(b'%b%b,"sequence_number":%d}\n\n' % (self._heads[item.id], _encode(text), number))

    def closed(self, item: OutputItem, status: str) -> None:
        if isinstance(item, FunctionCall):
            told: dict[str, Any] = {**_place(item), "name": item.name, "arguments": item.text}
            self._parts.append(self._event("response.function_call_arguments.done", told))
        else:
            told = {**_content(item), "text": item.text}
            if isinstance(item, Message):
                told["logprobs"] = item.logprobs
            kind = "output_text" if isinstance(item, Message) else "reasoning_text"
            self._parts.append(self._event(f"response.{kind}.done", told))
            self._parts.append(self._event("response.content_part.done", {**_content(item), "part": item.part()}))
        place = {"output_index": item.index, "item": item.object(status)}
        self._parts.append(self._event("response.output_item.done", place))

    def _delta(self, text: str, logprobs: list[dict[str, Any]] | None = None) -> bytes:
        number = self._num_events
        self._num_events = number + 1
        head = self._delta_head + _encode(text)
        if logprobs:
            return head + b',"logprobs":%b,"sequence_number":%d}\n\n' % (_encode(logprobs), number)
        return head + b',"logprobs":[],"sequence_number":%d}\n\n' % number

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        body = _encode({"type": kind, **fields, "sequence_number": self._num_events})
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), body)


def _place(item: OutputItem) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.index}


def _content(item: OutputItem) -> dict[str, Any]:
    return {**_place(item), "content_index": 0}
