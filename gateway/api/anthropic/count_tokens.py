"""`POST /v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from gateway.api.anthropic.request import read_prompt
from workers.protocol.requests import GenerateRequest


class CountTokens:
    def read(self, raw: bytes, scope: Scope) -> tuple[str, GenerateRequest]:
        return read_prompt(raw)

    def told(self, num_tokens: int) -> dict[str, Any]:
        return {"input_tokens": num_tokens}
