"""Makes of a request what is computed: with what was stored before, for a model, within its context."""

from __future__ import annotations

from starlette.types import Scope

from gateway.api.intake import Body
from gateway.api.responses.request import Draft, ResponseRequest
from gateway.api.responses.shelf import Shelf
from gateway.api.responses.truncation import Truncation
from gateway.api.session import conversation
from gateway.api.slo import read_begin_by
from gateway.call import Call, Principal
from gateway.pipeline import Pipeline
from gateway.telemetry.trail import Trail


class Preparation:
    def __init__(self, pipeline: Pipeline, truncation: Truncation) -> None:
        self._pipeline = pipeline
        self._truncation = truncation

    async def prepare(
        self, draft: Draft, shelf: Shelf, body: Body, principal: Principal, trail: Trail, scope: Scope
    ) -> tuple[ResponseRequest, Call]:
        """Return the complete request and its call. Raises PaddockError."""
        asked = await shelf.complete(draft, body)
        del draft  # the steps below may wait for long
        trail.held_bytes = body.num_bytes
        talk = conversation(scope, asked.requests[0], principal.team)
        call = self._pipeline.call(principal, asked.model, trail, "chat", read_begin_by(scope), talk)
        if asked.fit:
            asked = await self._truncation.fitted(asked, call.model, principal.team)
        return asked, call
