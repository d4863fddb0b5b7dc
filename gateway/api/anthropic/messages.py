"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from gateway.api.anthropic.request import MessagesRequest, read_messages_request, read_prompt
from gateway.api.anthropic.writing import StreamWriter, WholeWriter
from gateway.api.http.diagnostics import ignored_of
from gateway.call import Call
from gateway.telemetry.trail import Trail
from workers.protocol.requests import GenerateRequest


class MessagesDialect:
    """Anthropic's messages: reader and writers."""

    def read(self, raw: bytes, scope: Scope) -> MessagesRequest:
        return read_messages_request(raw, ignored_of(scope))

    def stream_writer(self, asked: MessagesRequest, call: Call, trail: Trail) -> StreamWriter:
        return StreamWriter(call, trail)

    def whole_writer(self, asked: MessagesRequest, call: Call, trail: Trail) -> WholeWriter:
        return WholeWriter(call)


class CountTokens:
    def read(self, raw: bytes, scope: Scope) -> tuple[str, GenerateRequest]:
        return read_prompt(raw, ignored_of(scope))

    def told(self, num_tokens: int) -> dict[str, Any]:
        return {"input_tokens": num_tokens}
