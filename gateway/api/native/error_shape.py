"""Writes errors in llama-server's form.

Source: `format_error_response` in tools/server/server-common.cpp of llama.cpp. Errors unknown there keep our type.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.api.dialect import ErrorShape
from gateway.errors import ContextOverflow, InternalError, PaddockError, UnsupportedParameter
from gateway.telemetry.request_log import RequestLog

_encode = msgspec.json.Encoder().encode

NOT_SUPPORTED = (501, "not_supported_error")

TOO_LONG = "request ({n_prompt_tokens} tokens) exceeds the available context size ({n_ctx} tokens)"
"""llama-server's message for a prompt that is too long, since its clients look for these words."""


class NativeErrors:
    def status(self, error: PaddockError) -> int:
        return _status_and_type(error)[0]

    def body(self, error: PaddockError, request_log: RequestLog) -> bytes:
        return _encode({"error": error_object(error)})


NATIVE: ErrorShape = NativeErrors()


def error_object(error: PaddockError) -> dict[str, Any]:
    """Return llama-server's object for an error; its `code` is the HTTP status."""
    status, kind = _status_and_type(error)
    document = {"code": status, "message": error.message, "type": kind}
    if isinstance(error, ContextOverflow) and error.n_ctx:
        document["message"] = error.worded(TOO_LONG)
        document |= {"n_prompt_tokens": error.num_prompt_tokens, "n_ctx": error.n_ctx}
    return document


def _status_and_type(error: PaddockError) -> tuple[int, str]:
    if isinstance(error, UnsupportedParameter):
        return NOT_SUPPORTED
    if isinstance(error, ContextOverflow):
        return error.status, "exceed_context_size_error"
    if isinstance(error, InternalError):
        return error.status, "server_error"
    return error.status, error.type
