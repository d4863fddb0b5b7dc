"""The apps of routes in any dialect: they generate text, do pooled work, or count the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from gateway.api.answering import Answering
from gateway.api.dialect import AskedT, Dialect
from gateway.api.http.answers import JSON, send_json, send_parts
from gateway.api.http.diagnostics import trail_of
from gateway.api.http.streaming import Pings
from gateway.api.intake.intake import Intake
from gateway.api.intake.presence import while_present
from gateway.api.request_head import conversation, read_begin_by, read_wish, session_of, talk_of
from gateway.api.resumable import Resumable
from gateway.api.shapes import answer_bytes
from gateway.call import Call, Principal
from gateway.catalog import JOB_OF
from gateway.dispatch.pipeline import Pipeline
from gateway.relay.relay import WorkerQueries
from workers.models.catalog import Job
from workers.protocol.events import Usage
from workers.protocol.pooled import PoolRequest, PoolResult
from workers.protocol.requests import GenerateRequest


class Generation(Generic[AskedT]):
    """The handler of a route that generates text."""

    def __init__(
        self,
        dialect: Dialect[AskedT],
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
        self._pipeline = pipeline
        self._intake = intake
        self._resumable = resumable
        self._job = job
        self._supersedes = supersedes
        self._answering = Answering(dialect, pipeline, pings, resumable)

    async def __call__(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        trail = trail_of(scope)
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


class PoolAsked(Protocol):
    """One request of a dialect, parsed."""

    @property
    def model(self) -> str:
        """The name that the caller gave; empty: none."""
        ...

    @property
    def request(self) -> PoolRequest: ...


PoolAskedT = TypeVar("PoolAskedT", bound=PoolAsked)


class PoolDialect(Protocol[PoolAskedT]):
    """A way to ask for pooled work. Stateless."""

    def read(self, raw: bytes, scope: Scope) -> PoolAskedT:
        """Return the parsed request. Raises PaddockError for what is invalid or not supported, naming the parameter."""
        ...

    def parts(self, asked: PoolAskedT, call: Call, result: PoolResult) -> Iterator[bytes]:
        """Yield the answer as JSON, a large one some rows at a time. Raises PaddockError before the first part."""
        ...


class Pooled(Generic[PoolAskedT]):
    """The handler of a route for pooled work."""

    def __init__(self, dialect: PoolDialect[PoolAskedT], pipeline: Pipeline, intake: Intake) -> None:
        self._dialect = dialect
        self._pipeline = pipeline
        self._intake = intake

    async def __call__(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        trail = trail_of(scope)
        async with self._intake.opened(principal, scope, receive) as body:
            asked = await body.decoded(lambda raw: self._dialect.read(raw, scope))
            begin_by, talk = read_begin_by(scope), talk_of(scope, trail.request_id)
            call = self._pipeline.call(principal, asked.model, trail, JOB_OF[asked.request.kind], begin_by, talk)
            async with while_present(receive):
                result = await self._pipeline.pool(call, asked.request, trail)
                trail.usage = Usage(sum(result.num_tokens), 0, 0)
                body.holds(answer_bytes(result))
                await send_parts(send, self._dialect.parts(asked, call, result), JSON, trail)


class CountDialect(Protocol):
    """Reads a dialect's question and writes the answer. Stateless."""

    def read(self, raw: bytes, scope: Scope) -> tuple[str, GenerateRequest]:
        """Return the model's name, and a request with the prompt. Raises PaddockError."""
        ...

    def told(self, num_tokens: int) -> dict[str, Any]: ...


class TokenCount:
    """The handler of the route."""

    def __init__(self, dialect: CountDialect, pipeline: Pipeline, queries: WorkerQueries, intake: Intake) -> None:
        self._dialect = dialect
        self._pipeline = pipeline
        self._queries = queries
        self._intake = intake

    async def __call__(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        trail = trail_of(scope)
        async with self._intake.opened(principal, scope, receive) as body:
            name, request = await body.decoded(lambda raw: self._dialect.read(raw, scope))
            call = self._pipeline.call(principal, name, trail)
            async with while_present(receive):
                num_tokens = await self._queries.num_tokens(call.model, request, principal.team)
        await send_json(send, self._dialect.told(num_tokens), trail)
