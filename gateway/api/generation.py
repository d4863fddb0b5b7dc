"""Generates text over HTTP, in any dialect: reads the request, then answers it."""

from __future__ import annotations

from dataclasses import replace
from typing import Generic

from starlette.types import Receive, Scope, Send

from gateway.access.keys import Keys
from gateway.api.answering import Answering
from gateway.api.caller import identified
from gateway.api.dialect import AskedT, Dialect
from gateway.api.intake import Intake
from gateway.api.resumable import Resumable
from gateway.api.session import conversation, session_of
from gateway.api.slo import read_begin_by
from gateway.api.streaming import Pings
from gateway.api.wish import read_wish
from gateway.pipeline import Pipeline
from workers.protocol.catalog import Job


class Generation(Generic[AskedT]):
    """The ASGI app of a route that generates text."""

    def __init__(
        self,
        dialect: Dialect[AskedT],
        keys: Keys,
        pipeline: Pipeline,
        intake: Intake,
        pings: Pings,
        resumable: Resumable,
        *,
        job: Job = "chat",
        supersedes: bool = False,
    ) -> None:
        """`job`: the work that its calls want done. `supersedes`: a newer call ends the older one of the same key and
        session (`x-session-id`).
        """
        self._dialect = dialect
        self._keys = keys
        self._pipeline = pipeline
        self._intake = intake
        self._resumable = resumable
        self._job = job
        self._supersedes = supersedes
        self._answering = Answering(dialect, pipeline, pings, resumable)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        principal, trail = await identified(self._keys, scope)
        async with self._intake.opened(principal, scope, receive) as body:
            wish = await read_wish(scope, body)
            if wish is not None and wish.stream:
                await self._resumable.again(wish, body, scope, receive, send)
                return
            asked = await body.decoded(lambda raw: self._dialect.read(raw, scope))
            trail.held_bytes = body.num_bytes
            talk = conversation(scope, asked.requests[0], principal.team)
            call = self._pipeline.call(principal, asked.model, trail, self._job, read_begin_by(scope), talk)
            if self._supersedes:
                call = replace(call, session=session_of(scope))
            await self._answering.answer(asked, call, wish, scope, receive, send)
