"""`POST /v1/completions`."""

from __future__ import annotations

from starlette.types import Scope

from gateway.api.diagnostics import ignored_of
from gateway.api.openai.completion_chunks import CompletionChunks
from gateway.api.openai.completion_request import CompletionRequest, read_completion
from gateway.api.openai.completion_whole import CompletionWhole
from gateway.call import Call
from gateway.telemetry.trail import Trail


class CompletionDialect:
    """OpenAI's completions: reader and writers."""

    def read(self, raw: bytes, scope: Scope) -> CompletionRequest:
        return read_completion(raw, ignored_of(scope))

    def stream_writer(self, asked: CompletionRequest, call: Call, trail: Trail) -> CompletionChunks:
        return CompletionChunks(asked, call, trail)

    def whole_writer(self, asked: CompletionRequest, call: Call, trail: Trail) -> CompletionWhole:
        return CompletionWhole(asked, call, trail)
