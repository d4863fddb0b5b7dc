"""Reads and writes the messages of the Responses API over WebSocket.

Source: OpenAI's API reference, "Responses client events" and "Responses server events"; `generate` is from its guide
"WebSocket mode".
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gateway.api.body import read_object
from gateway.api.dialect import ErrorShape
from gateway.api.parameters.faults import shown
from gateway.api.responses.request import Draft, draft_of
from gateway.api.sockets import Socket
from gateway.api.streaming import END, Written, whole_events
from gateway.errors import InvalidRequest, PaddockError, UnsupportedParameter
from gateway.telemetry.ignored import Ignored
from gateway.telemetry.trail import Trail

CREATE = "response.create"
DATA = b"\ndata: "
_LANE = re.compile(r"[A-Za-z0-9_.-]{1,256}")

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Create:
    """A message that asks for a response."""

    document: dict[str, Any]
    """The request, without the fields of the message itself."""
    lane: str
    """Its `stream_id`; empty: none."""
    num_bytes: int


def raw_message(text: str | None) -> bytes:
    """Return the message as bytes. Raises InvalidRequest."""
    if text is None:
        raise InvalidRequest("The message is of bytes. Send JSON as text.")
    return text.encode()


def read_message(raw: bytes) -> Create:
    """Return the parsed message. Raises InvalidRequest."""
    document = read_object(raw)
    kind, lane = document.pop("type", None), document.pop("stream_id", None)
    if kind != CREATE:
        raise InvalidRequest(f"`type` is {shown(kind)}. Send messages of the type `{CREATE}`.", param="type")
    if lane is not None and not (isinstance(lane, str) and _LANE.fullmatch(lane)):
        message = f"`stream_id` is {shown(lane)}. Send 1 to 256 of the characters A-Z, a-z, 0-9, `_`, `.` and `-`."
        raise InvalidRequest(message, param="stream_id")
    return Create(document, lane or "", len(raw))


def draft_of_message(message: Create, ignored: Ignored) -> Draft:
    """Return the parsed request of a message; `ignored` notes parameters that nothing is done with.

    Raises InvalidRequest, UnsupportedParameter or NotSupported, each naming the parameter by its path.
    """
    document = dict(message.document)
    generates = document.pop("generate", None)
    if not isinstance(generates, bool | None):
        raise InvalidRequest(f"`generate` is {shown(generates)}. Send true or false.", param="generate")
    if document.pop("background", None):
        text = "`background` is not for WebSocket. Send the request to `POST /v1/responses`."
        raise UnsupportedParameter(text, param="background")
    document["stream"] = True
    draft = draft_of(document, ignored, generates=generates is not False, num_bytes=message.num_bytes)
    return replace(draft, is_remembered=True)


class EventMessages:
    """Sends the events of one response (`gateway.api.answering.Sink`), each as a message."""

    def __init__(self, socket: Socket, lane: str) -> None:
        self.told = False
        """Whether something was sent."""
        self._socket = socket
        self._end = _end(lane)

    async def start(self) -> None:
        pass

    async def write(self, body: Written) -> None:
        """Write server-sent events. Waits while there is no room."""
        self.told = True
        for events in whole_events(body):
            for event in events.split(END):
                if event:
                    text = event[event.index(DATA) + len(DATA) : -1] + self._end
                    await self._socket.send(text.decode())
            if not isinstance(body, bytes):
                await asyncio.sleep(0)


def error_text(error: PaddockError, shape: ErrorShape, trail: Trail, lane: str) -> str:
    """Return `{"type": "error", "status", "error": {...}}`."""
    body = shape.body(error, trail)
    return (b'{"type":"error","status":%d,' % shape.status(error) + body[1:-1] + _end(lane)).decode()


def _end(lane: str) -> bytes:
    """Return the end of an event's object."""
    return b',"stream_id":%b}' % _encode(lane) if lane else b"}"
