"""`POST /v1/chat/completions`, its `input_tokens`, and `POST /v1/completions`.

Source of `input_tokens`: "Token Counting" in tools/server/README.md of llama.cpp.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from gateway.api.http.diagnostics import ignored_of
from gateway.api.openai.chat import ChunkWriter, WholeWriter
from gateway.api.openai.completion import CompletionChunks, CompletionWhole
from gateway.api.openai.requests import ChatRequest, CompletionRequest, read_chat, read_completion
from gateway.call import Call
from gateway.telemetry.trail import Trail
from workers.protocol.requests import GenerateRequest


class ChatDialect:
    """OpenAI's chat completions: reader and writers."""

    def read(self, raw: bytes, scope: Scope) -> ChatRequest:
        return read_chat(raw, ignored_of(scope))

    def stream_writer(self, asked: ChatRequest, call: Call, trail: Trail) -> ChunkWriter:
        return ChunkWriter(asked, call, trail)

    def whole_writer(self, asked: ChatRequest, call: Call, trail: Trail) -> WholeWriter:
        return WholeWriter(asked, call, trail)


class CompletionDialect:
    """OpenAI's completions: reader and writers."""

    def read(self, raw: bytes, scope: Scope) -> CompletionRequest:
        return read_completion(raw, ignored_of(scope))

    def stream_writer(self, asked: CompletionRequest, call: Call, trail: Trail) -> CompletionChunks:
        return CompletionChunks(asked, call, trail)

    def whole_writer(self, asked: CompletionRequest, call: Call, trail: Trail) -> CompletionWhole:
        return CompletionWhole(asked, call, trail)


class ChatInputTokens:
    def read(self, raw: bytes, scope: Scope) -> tuple[str, GenerateRequest]:
        asked = read_chat(raw, ignored_of(scope))
        return asked.model, asked.requests[0]

    def told(self, num_tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": num_tokens}
