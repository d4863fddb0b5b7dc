"""Writes errors in Anthropic's form.

Source: Anthropic's API reference, "Errors".
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.api.anthropic.body import THREAD
from gateway.api.dialect import ErrorShape
from gateway.errors import ContextOverflow, PaddockError, UnsupportedParameter
from gateway.telemetry.request_log import RequestLog

_encode = msgspec.json.Encoder().encode

OVERLOADED = 529

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "invalid_request_error",
    500: "api_error",
    501: "not_supported_error",
    502: "overloaded_error",
    503: "overloaded_error",
}
"""HTTP status of our error -> Anthropic's type. 502 (worker lost) and 503 (no worker) get one that clients retry."""

TOO_LONG = "prompt is too long: {n_prompt_tokens} tokens > {n_ctx} maximum, answer included"
"""Anthropic's message for a prompt that is too long; Claude Code uses both numbers to shorten the conversation."""

NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": [THREAD]}
"""Error details from which Anthropic's SDK learns that the server keeps no threads; it then sends all messages."""


class AnthropicErrors:
    def status(self, error: PaddockError) -> int:
        return OVERLOADED if _type(error) == "overloaded_error" else error.status

    def body(self, error: PaddockError, request_log: RequestLog) -> bytes:
        return error_body(error, request_log)


ANTHROPIC: ErrorShape = AnthropicErrors()


def error_body(error: PaddockError, request_log: RequestLog) -> bytes:
    """Return `{"type": "error", "error": {...}, "request_id": ...}`."""
    message = error.worded(TOO_LONG) if isinstance(error, ContextOverflow) else error.message
    inner: dict[str, Any] = {"type": _type(error), "message": message}
    if isinstance(error, UnsupportedParameter) and error.param == THREAD:
        inner["details"] = NO_THREADS
    return _encode({"type": "error", "error": inner, "request_id": request_log.request_id})


def _type(error: PaddockError) -> str:
    return TYPES.get(error.status, "api_error")
