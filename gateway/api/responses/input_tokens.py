"""`POST /v1/responses/input_tokens`: counts the tokens that a request would have, without an answer."""

from __future__ import annotations

from functools import partial

from starlette.types import Receive, Scope, Send

from gateway.access.keys import Keys
from gateway.api.answers import send_json
from gateway.api.caller import identified
from gateway.api.intake import Intake
from gateway.api.presence import while_present
from gateway.api.responses.request import read_draft
from gateway.api.responses.shelf import Shelf
from gateway.inquiries import Inquiries
from gateway.pipeline import Pipeline


class InputTokens:
    def __init__(self, keys: Keys, pipeline: Pipeline, intake: Intake, shelf: Shelf, inquiries: Inquiries) -> None:
        self._keys = keys
        self._pipeline = pipeline
        self._intake = intake
        self._shelf = shelf
        self._inquiries = inquiries

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        principal, trail = await identified(self._keys, scope)
        async with self._intake.opened(principal, scope, receive) as body:
            draft = await body.decoded(partial(read_draft, ignored=trail.ignored))
            asked = await self._shelf.complete(draft, body)
            call = self._pipeline.call(principal, asked.model, trail)
            async with while_present(receive):
                num_tokens = await self._inquiries.num_tokens(call.model, asked.requests[0], principal.team)
        await send_json(send, {"object": "response.input_tokens", "input_tokens": num_tokens}, trail)
