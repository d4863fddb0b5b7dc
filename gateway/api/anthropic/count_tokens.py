"""`POST /v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from gateway.api.anthropic.request import read_prompt
from gateway.api.diagnostics import ignored_of
from workers.protocol.requests import GenerateRequest


class CountTokens:
    def read(self, raw: bytes, scope: Scope) -> tuple[str, GenerateRequest]:
        return read_prompt(raw, ignored_of(scope))

    def told(self, num_tokens: int) -> dict[str, Any]:
        return {"input_tokens": num_tokens}
