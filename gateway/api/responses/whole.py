"""Writes a response as one whole object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.api.answers import gathered, in_parts
from gateway.api.responses.output import Output
from gateway.api.responses.records import NewRecord
from gateway.api.responses.request import ResponseRequest
from gateway.api.responses.snapshot import Snapshot
from gateway.call import Call
from workers.protocol.events import CallEvent


class WholeWriter:
    def __init__(self, asked: ResponseRequest, call: Call) -> None:
        self.snapshot = Snapshot(asked, call)
        self._output = Output(asked.id, None, custom=asked.custom_tools)

    def add(self, events: list[CallEvent], choice: int) -> None:
        for event in events:
            self._output.add(event)

    def parts(self) -> Iterator[bytes]:
        """Yield the `response` object as JSON."""
        return gathered(in_parts(self.response()))

    def response(self, *, brief: bool = False) -> dict[str, Any]:
        """Return the response; `brief` as in `Output.objects`."""
        output = self._output
        if output.end is None:
            raise ValueError("the answer has no end")
        return self.snapshot.ended(output.objects(brief=brief), output.end, output.num_reasoning_tokens)

    def record(self, response: dict[str, Any]) -> NewRecord:
        asked = self.snapshot.asked
        return NewRecord(response=response, input=asked.to_keep, chain=asked.chain)
