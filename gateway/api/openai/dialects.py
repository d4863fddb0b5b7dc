"""`POST /v1/chat/completions`, its `input_tokens`, and `POST /v1/completions`.

Source of `input_tokens`: "Token Counting" in tools/server/README.md of llama.cpp.
"""

from __future__ import annotations

from starlette.types import Scope

from gateway.api.http.diagnostics import ignored_of
from gateway.api.openai.chat import ChunkWriter, WholeWriter
from gateway.api.openai.completion import CompletionChunks, CompletionWhole
from gateway.api.openai.requests import ChatRequest, CompletionRequest, read_chat, read_completion
from gateway.call import Call
from gateway.telemetry.trail import Ignored, Trail
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


def read_chat_prompt(raw: bytes, ignored: Ignored) -> tuple[str, GenerateRequest]:
    """Return the model's name, and a request with the prompt. Raises as `read_chat`."""
    asked = read_chat(raw, ignored)
    return asked.model, asked.requests[0]
