"""`POST /v1/responses`: answers whole, streamed, or in the background."""

from __future__ import annotations

from functools import partial

from starlette.types import Receive, Scope, Send

from gateway.access.keys import Keys
from gateway.api.answering import Answering
from gateway.api.caller import identified
from gateway.api.intake import Intake
from gateway.api.presence import while_present
from gateway.api.responses.background import Background
from gateway.api.responses.preparation import Preparation
from gateway.api.responses.request import ResponseRequest, read_draft
from gateway.api.responses.shelf import Shelf
from gateway.api.resumable import Resumable
from gateway.api.wish import read_wish


class CreateResponse:
    def __init__(
        self,
        keys: Keys,
        intake: Intake,
        resumable: Resumable,
        shelf: Shelf,
        answering: Answering[ResponseRequest],
        background: Background,
        preparation: Preparation,
    ) -> None:
        self._keys = keys
        self._intake = intake
        self._resumable = resumable
        self._shelf = shelf
        self._answering = answering
        self._background = background
        self._preparation = preparation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        principal, trail = await identified(self._keys, scope)
        async with self._intake.opened(principal, scope, receive) as body:
            wish = await read_wish(scope, body)
            if wish is not None and wish.stream:
                await self._resumable.again(wish, body, scope, receive, send)
                return
            async with while_present(receive):
                # The draft gets no name here: it would be kept until the answer ends, beside what is made of it.
                asked, call = await self._preparation.prepare(
                    await body.decoded(partial(read_draft, ignored=trail.ignored)),
                    self._shelf,
                    body,
                    principal,
                    trail,
                    scope,
                )
            if asked.background:
                await self._background.begin(asked, call, wish, scope, receive, send)
            else:
                await self._answering.answer(asked, call, wish, scope, receive, send)
