"""`POST /v1/chat/completions/input_tokens`: how many tokens a conversation would have.

Source: "Token Counting" in tools/server/README.md of llama.cpp.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from gateway.api.diagnostics import ignored_of
from gateway.api.openai.chat_request import read_chat
from workers.protocol.requests import GenerateRequest


class ChatInputTokens:
    def read(self, raw: bytes, scope: Scope) -> tuple[str, GenerateRequest]:
        asked = read_chat(raw, ignored_of(scope))
        return asked.model, asked.requests[0]

    def told(self, num_tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": num_tokens}
