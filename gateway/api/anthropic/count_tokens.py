"""`POST /v1/messages/count_tokens`."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from gateway.access.keys import Keys
from gateway.api.answers import send_json
from gateway.api.anthropic.request import read_prompt
from gateway.api.body import read_body
from gateway.api.diagnostics import trail_of
from gateway.inquiries import Inquiries
from gateway.pipeline import Pipeline
from workers.protocol.text import RENDER_PATH, Render, decode_rendered


class CountTokens:
    """The ASGI app of the route: a worker renders the prompt and counts."""

    def __init__(self, keys: Keys, pipeline: Pipeline, inquiries: Inquiries, max_body_bytes: int) -> None:
        self._keys = keys
        self._pipeline = pipeline
        self._inquiries = inquiries
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trail = trail_of(scope)
        principal = self._keys.authenticate(scope["headers"])
        trail.team, trail.key_id = principal.team, principal.key_id
        name, request = read_prompt(await read_body(scope, receive, self._max_body_bytes))
        call = self._pipeline.call(principal, name, trail)
        render = Render(request=request, text=False)
        rendered = await self._inquiries.of_model(call.model, "POST", RENDER_PATH, decode_rendered, render)
        await send_json(send, {"input_tokens": rendered.num_tokens or 0}, trail)
