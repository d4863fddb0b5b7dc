"""Joins readers and writers of `/v1/chat/completions`, `/v1/chat/completions/input_tokens` and `/v1/completions`.

Source of `input_tokens`: "Token Counting" in tools/server/README.md of llama.cpp.
"""

from __future__ import annotations

from starlette.types import Scope

from gateway.api.http.diagnostics import ignored_of
from gateway.api.intake.intake import attachments_of
from gateway.api.media.attachments import Attachments
from gateway.api.openai.chat import WholeWriter, chunk_writer
from gateway.api.openai.completion import CompletionWhole, completion_writer
from gateway.api.openai.requests import ChatRequest, CompletionRequest, read_chat, read_completion
from gateway.api.openai.writing import ChunkWriter
from gateway.call import Call
from gateway.telemetry.request_log import Ignored, RequestLog
from workers.protocol.requests import GenerateRequest


class ChatDialect:
    """Reads and writes OpenAI's chat completions."""

    def read(self, raw: bytes, scope: Scope) -> ChatRequest:
        return read_chat(raw, ignored_of(scope), attachments_of(scope))

    def stream_writer(self, asked: ChatRequest, call: Call, request_log: RequestLog) -> ChunkWriter:
        return chunk_writer(asked, call, request_log)

    def whole_writer(self, asked: ChatRequest, call: Call, request_log: RequestLog) -> WholeWriter:
        return WholeWriter(asked, call, request_log)


class CompletionDialect:
    """Reads and writes OpenAI's completions."""

    def read(self, raw: bytes, scope: Scope) -> CompletionRequest:
        return read_completion(raw, ignored_of(scope))

    def stream_writer(self, asked: CompletionRequest, call: Call, request_log: RequestLog) -> ChunkWriter:
        return completion_writer(asked, call, request_log)

    def whole_writer(self, asked: CompletionRequest, call: Call, request_log: RequestLog) -> CompletionWhole:
        return CompletionWhole(asked, call, request_log)


def read_chat_prompt(raw: bytes, ignored: Ignored, attachments: Attachments) -> tuple[str, GenerateRequest]:
    """Return the model's name, and a request with the prompt, to count its tokens. Raises what `read_chat` raises."""
    asked = read_chat(raw, ignored, attachments)
    return asked.model, asked.requests[0]
