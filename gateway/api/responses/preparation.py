"""From what was sent to what is computed: with what was kept, for a model, within its context."""

from __future__ import annotations

from gateway.api.responses.request import Draft, ResponseRequest
from gateway.api.responses.shelf import Shelf
from gateway.api.responses.truncation import Truncation
from gateway.call import Call, Principal
from gateway.pipeline import Pipeline
from gateway.telemetry.trail import Trail


class Preparation:
    def __init__(self, pipeline: Pipeline, truncation: Truncation) -> None:
        self._pipeline = pipeline
        self._truncation = truncation

    async def prepare(
        self, draft: Draft, shelf: Shelf, principal: Principal, trail: Trail, begin_by: float
    ) -> tuple[ResponseRequest, Call]:
        """`begin_by` as in `Call`. Raises PaddockError."""
        asked = await shelf.complete(draft, principal.team)
        call = self._pipeline.call(principal, asked.model, trail, "generate", begin_by)
        if asked.fit:
            asked = await self._truncation.fitted(asked, call.model)
        return asked, call
