"""llama-server's errors."""

from __future__ import annotations

import json

import pytest

from gateway.api.native.error_shape import NATIVE
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
from gateway.relay.failures import answer_to
from gateway.telemetry.trail import Trail
from workers.protocol.failures import Failure, FailureCode


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
    trail = Trail("r", "POST", "/completion")
    assert NATIVE.status(error) == code
    assert json.loads(NATIVE.body(error, trail)) == {"error": {"code": code, "message": "m", "type": kind}}


def test_a_prompt_that_is_too_long_is_told_in_numbers() -> None:
    error = answer_to(Failure(FailureCode.CONTEXT_OVERFLOW, "m", "prompt", 600, 512))
    inner = json.loads(NATIVE.body(error, Trail("r", "POST", "/completion")))["error"]
    assert (inner["n_prompt_tokens"], inner["n_ctx"], error.param) == (600, 512, "prompt")
