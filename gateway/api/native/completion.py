"""`POST /completion`, `POST /completions` and `POST /infill`."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Scope

from gateway.api.native.answer import Place
from gateway.api.native.completion_chunks import ChunkWriter
from gateway.api.native.completion_request import CompletionRequest, read_completion, read_infill
from gateway.api.native.completion_whole import WholeWriter
from gateway.call import Call
from gateway.telemetry.trail import Trail


class CompletionDialect:
    """llama-server's completions; with `infill`, those of code."""

    def __init__(self, place: Place, *, infill: bool = False) -> None:
        self._place = place
        self._read: Callable[[bytes, Scope], CompletionRequest] = read_infill if infill else read_completion

    def read(self, raw: bytes, scope: Scope) -> CompletionRequest:
        return self._read(raw, scope)

    def stream_writer(self, asked: CompletionRequest, call: Call, trail: Trail) -> ChunkWriter:
        return ChunkWriter(asked, call, trail, self._place)

    def whole_writer(self, asked: CompletionRequest, call: Call, trail: Trail) -> WholeWriter:
        return WholeWriter(asked, call, trail, self._place)
