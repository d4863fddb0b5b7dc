"""How OpenAI's dialect tells an error; routes of no dialect do as well.

Source: OpenAI's API reference, "Error".
"""

from __future__ import annotations

import msgspec

from gateway.api.dialect import ErrorShape
from gateway.errors import PaddockError
from gateway.telemetry.trail import Trail

_encode = msgspec.json.Encoder().encode


class OpenAiErrors:
    def status(self, error: PaddockError) -> int:
        return error.status

    def body(self, error: PaddockError, trail: Trail) -> bytes:
        return error_body(error)


OPENAI: ErrorShape = OpenAiErrors()


def error_body(error: PaddockError) -> bytes:
    """`{"error": {...}}`."""
    inner = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return _encode({"error": inner})
