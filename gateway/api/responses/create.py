"""`POST /v1/responses`: whole, streamed, or in the background."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from gateway.access.keys import Keys
from gateway.api.answering import Answering
from gateway.api.body import read_body
from gateway.api.diagnostics import trail_of
from gateway.api.responses.background import Background
from gateway.api.responses.request import ResponseRequest, read_draft
from gateway.api.responses.shelf import Shelf
from gateway.api.responses.token_counts import TokenCounts
from gateway.api.resumable import Resumable
from gateway.api.slo import read_begin_by
from gateway.api.wish import read_wish
from gateway.pipeline import Pipeline


class CreateResponse:
    def __init__(
        self,
        keys: Keys,
        pipeline: Pipeline,
        max_body_bytes: int,
        resumable: Resumable,
        shelf: Shelf,
        answering: Answering[ResponseRequest],
        background: Background,
        token_counts: TokenCounts,
    ) -> None:
        self._keys = keys
        self._pipeline = pipeline
        self._max_body_bytes = max_body_bytes
        self._resumable = resumable
        self._shelf = shelf
        self._answering = answering
        self._background = background
        self._token_counts = token_counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trail = trail_of(scope)
        principal = self._keys.authenticate(scope["headers"])
        trail.team, trail.key_id = principal.team, principal.key_id
        raw = await read_body(scope, receive, self._max_body_bytes)
        wish = read_wish(scope, raw, principal.team)
        if wish is not None and wish.stream:
            await self._resumable.again(wish, scope, receive, send)
            return
        asked = await self._shelf.complete(read_draft(raw), principal.team)
        call = self._pipeline.call(principal, asked.model, trail, begin_by=read_begin_by(scope))
        if asked.fit:
            asked = await self._token_counts.fitted(asked, call.model)
        if asked.background:
            await self._background.begin(asked, call, wish, scope, receive, send)
        else:
            await self._answering.answer(asked, call, wish, scope, receive, send)
