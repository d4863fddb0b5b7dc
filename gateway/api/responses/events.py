"""Writes a response as a stream of typed events.

Source of the shapes: OpenAI's API reference, "Streaming events" of Responses. There is no `[DONE]`: the last event is
`response.completed`, `response.incomplete`, `response.failed` or `error`.
"""

from __future__ import annotations

from typing import Any

from gateway.api.responses.item_events import ItemEvents
from gateway.api.responses.output import Message, Output
from gateway.api.responses.records import NewRecord
from gateway.api.responses.request import ResponseRequest
from gateway.api.responses.snapshot import Snapshot
from gateway.api.streaming import Written
from gateway.call import Call
from gateway.errors import PaddockError
from workers.protocol.events import CallEvent, Progress, Text, TimingsSoFar


class EventWriter:
    """Writes one streamed response."""

    def __init__(self, asked: ResponseRequest, call: Call) -> None:
        self.snapshot = Snapshot(asked, call)
        self._items = ItemEvents()
        self._output = Output(asked.id, self._items, speaks=asked.generates, custom=asked.custom_tools)
        self._tells_timings = "timings" in asked.requests[0].tell
        self._told = self._begun = False

    def queued(self) -> bytes:
        """Return the events that begin the stream where the caller does not wait for the answer."""
        self._told = True
        told = {"response": self.snapshot.object("queued")}
        return self._items.event("response.created", told) + self._items.event("response.queued", told)

    def idle(self) -> bytes:
        """Return the state of the response: it waits, or it goes on."""
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
        # Nothing was said of a response yet: a caller who waited for a slot learns why there is none.
        told = {"code": error.code or error.type, "message": error.message, "param": error.param}
        return self._items.event("error", told)

    def response(self, *, brief: bool = False) -> dict[str, Any]:
        """Return the response of a complete answer; `brief` as in `Output.objects`."""
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
        """Return the response of a cancelled answer."""
        return self.snapshot.object("cancelled", self._output.objects(brief=True))

    def _ending(self, response: dict[str, Any], brief: dict[str, Any], **fields: Any) -> Written:
        """Return the last event, which tells all of the response once more."""
        told, few = {"response": response, **fields}, {"response": brief, **fields}
        event = self._items.long_event(f"response.{response['status']}", told, few)
        return [event] if self._output.is_long else b"".join(event.parts)
