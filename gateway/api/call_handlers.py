"""Makes the handlers of routes in any dialect: they generate text, do pooled work, or count the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from gateway.api.answering import Answering
from gateway.api.dialect import AskedT, Dialect, Handler
from gateway.api.http.answers import JSON, send_json, send_parts
from gateway.api.http.diagnostics import request_log_of
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
from gateway.telemetry.request_log import Ignored
from workers.models.catalog import Job
from workers.protocol.events import Usage
from workers.protocol.pooled import PoolRequest, PoolResult
from workers.protocol.requests import GenerateRequest


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


PromptReader = Callable[[bytes, Ignored], tuple[str, GenerateRequest]]
"""Returns the model's name, and a request with the prompt of a body. Raises PaddockError."""


@dataclass(frozen=True, slots=True)
class CallHandlers:
    """The parts that calls of all dialects go through. Its methods return handlers."""

    pipeline: Pipeline
    intake: Intake
    pings: Pings
    resumable: Resumable
    queries: WorkerQueries

    def generate(self, dialect: Dialect[AskedT], *, job: Job = "chat", supersedes: bool = False) -> Handler:
        """Return the handler of a route that generates text. `job`: the work that its calls want done. `supersedes`: a
        newer call ends the older one of the same key and session (`x-session-id`).
        """
        answering = Answering(dialect, self.pipeline, self.pings, self.resumable)

        async def handle(principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
            request_log = request_log_of(scope)
            async with self.intake.opened(principal, scope, receive) as body:
                wish = await read_wish(scope, body)
                if wish is not None and wish.stream:
                    await self.resumable.again(wish, body, scope, receive, send)
                    return
                asked = await body.decoded(lambda raw: dialect.read(raw, scope))
                request_log.held_bytes = body.num_bytes
                talk = conversation(scope, asked.requests[0], principal.team)
                call = self.pipeline.call(principal, asked.model, request_log, job, read_begin_by(scope), talk)
                if supersedes:
                    call = replace(call, session=session_of(scope))
                await answering.answer(asked, call, wish, scope, receive, send)

        return handle

    def pool(self, dialect: PoolDialect[PoolAskedT]) -> Handler:
        """Return the handler of a route for pooled work."""

        async def handle(principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
            request_log = request_log_of(scope)
            async with self.intake.opened(principal, scope, receive) as body:
                asked = await body.decoded(lambda raw: dialect.read(raw, scope))
                begin_by, talk = read_begin_by(scope), talk_of(scope, request_log.request_id)
                call = self.pipeline.call(
                    principal, asked.model, request_log, JOB_OF[asked.request.kind], begin_by, talk
                )
                async with while_present(receive):
                    result = await self.pipeline.pool(call, asked.request, request_log)
                    request_log.usage = Usage(sum(result.num_tokens), 0, 0)
                    body.holds(answer_bytes(result))
                    await send_parts(send, dialect.parts(asked, call, result), JSON, request_log)

        return handle

    def count_tokens(self, read: PromptReader, fields: Mapping[str, str]) -> Handler:
        """Return the handler of a route that counts a prompt's tokens. `fields`: others of the answer."""

        async def handle(principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
            request_log = request_log_of(scope)
            async with self.intake.opened(principal, scope, receive) as body:
                name, request = await body.decoded(lambda raw: read(raw, request_log.ignored))
                call = self.pipeline.call(principal, name, request_log)
                async with while_present(receive):
                    num_tokens = await self.queries.num_tokens(call.model, request, principal.team)
            await send_json(send, {**fields, "input_tokens": num_tokens}, request_log)

        return handle
