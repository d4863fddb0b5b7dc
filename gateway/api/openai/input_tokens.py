"""`POST /v1/chat/completions/input_tokens`: how many tokens a conversation would have, without an answer.

Source: "Token Counting" in tools/server/README.md of llama.cpp.
"""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from gateway.access.keys import Keys
from gateway.api.answers import send_json
from gateway.api.body import read_body
from gateway.api.diagnostics import trail_of
from gateway.api.openai.chat_request import read_chat
from gateway.inquiries import Inquiries
from gateway.pipeline import Pipeline
from workers.protocol.text import RENDER_PATH, Render, decode_rendered


class ChatInputTokens:
    def __init__(self, keys: Keys, pipeline: Pipeline, inquiries: Inquiries, max_body_bytes: int) -> None:
        self._keys = keys
        self._pipeline = pipeline
        self._inquiries = inquiries
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trail = trail_of(scope)
        principal = self._keys.authenticate(scope["headers"])
        trail.team, trail.key_id = principal.team, principal.key_id
        asked = read_chat(await read_body(scope, receive, self._max_body_bytes))
        call = self._pipeline.call(principal, asked.model, trail)
        render = Render(request=asked.requests[0], text=False)
        rendered = await self._inquiries.of_model(call.model, "POST", RENDER_PATH, decode_rendered, render)
        answer = {"object": "response.input_tokens", "input_tokens": rendered.num_tokens or 0}
        await send_json(send, answer, trail)
