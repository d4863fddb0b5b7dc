"""`POST /v1/chat/completions`."""

from __future__ import annotations

from starlette.types import Scope

from gateway.api.diagnostics import ignored_of
from gateway.api.openai.chat_chunks import ChunkWriter
from gateway.api.openai.chat_request import ChatRequest, read_chat
from gateway.api.openai.chat_whole import WholeWriter
from gateway.call import Call
from gateway.telemetry.trail import Trail


class ChatDialect:
    """OpenAI's chat completions: reader and writers."""

    def read(self, raw: bytes, scope: Scope) -> ChatRequest:
        return read_chat(raw, ignored_of(scope))

    def stream_writer(self, asked: ChatRequest, call: Call, trail: Trail) -> ChunkWriter:
        return ChunkWriter(asked, call, trail)

    def whole_writer(self, asked: ChatRequest, call: Call, trail: Trail) -> WholeWriter:
        return WholeWriter(asked, call, trail)
