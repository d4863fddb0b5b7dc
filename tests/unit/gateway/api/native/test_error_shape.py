"""llama-server's errors."""

from __future__ import annotations

import json

import pytest

from gateway.api.native.error_shape import NATIVE
from gateway.dispatch.upstream import error_for
from gateway.errors import (
    AuthenticationFailed,
    ContextOverflow,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NotSupported,
    PaddockError,
    PermissionDenied,
    QueueTimeout,
    UnsupportedParameter,
)
from gateway.telemetry.request_log import RequestLog
from workers.protocol.events import Failure, FailureCode, context_overflow


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (InvalidRequest("m"), 400, "invalid_request_error"),
        (ContextOverflow("m"), 400, "exceed_context_size_error"),
        (UnsupportedParameter("m"), 501, "not_supported_error"),
        (NotSupported("m"), 501, "not_supported_error"),
        (AuthenticationFailed("m"), 401, "authentication_error"),
        (PermissionDenied("m"), 403, "permission_error"),
        (ModelNotFound("m"), 404, "not_found_error"),
        (QueueTimeout("m"), 503, "unavailable_error"),
        (InternalError("m"), 500, "server_error"),
    ],
)
def test_status_and_type(error: PaddockError, code: int, kind: str) -> None:
    request_log = RequestLog("r", "POST", "/completion")
    assert NATIVE.status(error) == code
    assert json.loads(NATIVE.body(error, request_log)) == {"error": {"code": code, "message": "m", "type": kind}}


def test_a_prompt_that_is_too_long_is_told_in_llama_servers_words() -> None:
    error = error_for(context_overflow(600, 512, is_whole=False))
    inner = json.loads(NATIVE.body(error, RequestLog("r", "POST", "/completion")))["error"]
    assert (inner["n_prompt_tokens"], inner["n_ctx"]) == (600, 512)
    assert inner["message"] == (
        "request (600 tokens) exceeds the available context size (512 tokens); counting stopped at that number; "
        "shorten it or serve the model with a larger --ctx"
    )


def test_a_worker_that_tells_no_remedy_is_understood() -> None:
    error = error_for(Failure(FailureCode.CONTEXT_OVERFLOW, "the prompt is too long", "prompt", 600, 512))
    message = json.loads(NATIVE.body(error, RequestLog("r", "POST", "/completion")))["error"]["message"]
    assert (message.endswith("(512 tokens); the prompt is too long"), error.param) == (True, "prompt")
