"""Writes errors in OpenAI's form; routes of no dialect use it as well.

Source: OpenAI's API reference, "Error".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.api.dialect import ErrorShape
from gateway.errors import ContextOverflow, PaddockError
from gateway.telemetry.trail import Trail

_encode = msgspec.json.Encoder().encode


class OpenAiErrors:
    def __init__(self, prompt: str = "messages") -> None:
        """`prompt`: the route's name for the model's input, which workers call `messages`."""
        self._names = {"messages": prompt}

    def status(self, error: PaddockError) -> int:
        return error.status

    def body(self, error: PaddockError, trail: Trail) -> bytes:
        return error_body(error, self._names)


OPENAI: ErrorShape = OpenAiErrors()
COMPLETIONS: ErrorShape = OpenAiErrors("prompt")
RESPONSES: ErrorShape = OpenAiErrors("input")


def error_body(error: PaddockError, names: Mapping[str, str] | None = None) -> bytes:
    """Return `{"error": {...}}`. `names`: a worker's name for a parameter -> the route's name.

    The numbers of a prompt that is too long are llama-server's, whose own page shows them.
    """
    param = (names or {}).get(error.param or "", error.param)
    inner: dict[str, Any] = {"message": error.message, "type": error.type, "param": param, "code": error.code}
    if isinstance(error, ContextOverflow) and error.n_ctx:
        inner |= {"n_prompt_tokens": error.num_prompt_tokens, "n_ctx": error.n_ctx}
    return _encode({"error": inner})
