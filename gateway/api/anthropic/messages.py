"""`POST /v1/messages`."""

from __future__ import annotations

from starlette.types import Scope

from gateway.api.anthropic.request import MessagesRequest, read_messages_request
from gateway.api.anthropic.stream import StreamWriter
from gateway.api.anthropic.whole import WholeWriter
from gateway.api.diagnostics import ignored_of
from gateway.call import Call
from gateway.telemetry.trail import Trail


class MessagesDialect:
    """Anthropic's messages: reader and writers."""

    def read(self, raw: bytes, scope: Scope) -> MessagesRequest:
        return read_messages_request(raw, ignored_of(scope))

    def stream_writer(self, asked: MessagesRequest, call: Call, trail: Trail) -> StreamWriter:
        return StreamWriter(call, trail)

    def whole_writer(self, asked: MessagesRequest, call: Call, trail: Trail) -> WholeWriter:
        return WholeWriter(call)
