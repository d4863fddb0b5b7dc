"""Makes handlers for routes of every dialect: to generate text, do pooled work (vectors, scores) or count tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from gateway.api.dialect import Dialect, Handler, RequestT
from gateway.api.http.answers import JSON, send_json, send_parts
from gateway.api.http.diagnostics import request_log_of
from gateway.api.http.streaming import Pings
from gateway.api.intake.disconnect import until_disconnect
from gateway.api.intake.intake import Intake
from gateway.api.media.attachments import Attachments
from gateway.api.media.loader import MediaLoader
from gateway.api.request_headers import (
    conversation_key,
    read_autoload,
    read_resume_options,
    read_ttft_deadline,
    session_of,
    session_or_request_id,
)
from gateway.api.responder import Responder
from gateway.api.resumable import Resumable
from gateway.api.shapes import answer_bytes
from gateway.call import Call, Principal
from gateway.catalog.jobs import JOB_OF
from gateway.dispatch.call_resolver import CallResolver
from gateway.dispatch.pipeline import Pipeline
from gateway.relay.relay import WorkerQueries
from gateway.telemetry.request_log import Ignored
from workers.models.catalog import Job
from workers.protocol.events import Usage
from workers.protocol.pooled import PoolKind, PoolRequest, PoolResult
from workers.protocol.requests import GenerateRequest


class PooledRequest(Protocol):
    """A parsed request for pooled work, in some dialect."""

    @property
    def model(self) -> str:
        """The model name that the caller sent; empty: the caller sent none."""
        ...

    @property
    def request(self) -> PoolRequest: ...


PooledRequestT = TypeVar("PooledRequestT", bound=PooledRequest)


class PoolDialect(Protocol[PooledRequestT]):
    """Reads requests for pooled work in one dialect, and writes their answers. Stateless."""

    kind: PoolKind
    """The kind of work that all its requests ask for."""

    def read(self, raw: bytes, scope: Scope) -> PooledRequestT:
        """Return the parsed request. Raises PaddockError for what is invalid or not supported, naming the parameter."""
        ...

    def parts(self, asked: PooledRequestT, call: Call, result: PoolResult) -> Iterator[bytes]:
        """Yield the answer as JSON; a large one in parts of several rows. Raises PaddockError before the first part."""
        ...


PromptReader = Callable[[bytes, Ignored, Attachments], tuple[str, GenerateRequest]]
"""Reads a body, from which files were cut out: returns the model's name, and a request with the prompt to count. Raises
PaddockError."""


@dataclass(frozen=True, slots=True)
class CallHandlers:
    """Makes handlers for routes of every dialect: each method makes one kind. All of them share the parts held here."""

    resolver: CallResolver
    pipeline: Pipeline
    intake: Intake
    pings: Pings
    resumable: Resumable
    queries: WorkerQueries
    media: MediaLoader

    def generate(
        self,
        dialect: Dialect[RequestT],
        *,
        job: Job = "chat",
        supersedes: bool = False,
        takes_media: bool = False,
        is_form: bool = False,
    ) -> Handler:
        """Return the handler of a route that generates text. `job`: what the model must be able to do. `supersedes`:
        whether a newer call ends the older one of the same key and session (`x-session-id`). `takes_media`: whether
        prompts may have pictures and sounds. `is_form`: whether bodies are forms with a file, instead of JSON."""
        responder = Responder(dialect, self.pipeline, self.pings, self.resumable)

        async def handle(principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
            request_log = request_log_of(scope)
            form = {"takes_media": takes_media, "is_form": is_form}
            async with self.intake.open_body(principal, scope, receive, **form) as body:
                resume = await read_resume_options(scope, body)
                if resume is not None and resume.stream:
                    await self.resumable.again(resume, body, scope, receive, send)
                    return
                self.resolver.begin(principal, request_log, job)
                asked = await body.decode(lambda raw: dialect.read(raw, scope))
                conversation = conversation_key(scope, asked.requests[0], principal.team)
                call = self.resolver.resolve(
                    principal,
                    asked.model,
                    request_log,
                    job,
                    read_ttft_deadline(scope),
                    conversation,
                    adapters=asked.requests[0].adapters,
                    held_bytes=body.num_bytes,
                    autoload=read_autoload(scope),
                )
                asked, call = await self.media.prepare(asked, call, body.hold, receive)
                if supersedes:
                    call = replace(call, session=session_of(scope))
                await responder.answer(asked, call, resume, scope, receive, send)

        return handle

    def pool(self, dialect: PoolDialect[PooledRequestT], *, takes_media: bool = False) -> Handler:
        """Return the handler of a route for pooled work. `takes_media`: whether inputs may have pictures and sounds."""

        async def handle(principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
            request_log = request_log_of(scope)
            async with self.intake.open_body(principal, scope, receive, takes_media=takes_media) as body:
                self.resolver.begin(principal, request_log, JOB_OF[dialect.kind])
                asked = await body.decode(lambda raw: dialect.read(raw, scope))
                begin_by, conversation = read_ttft_deadline(scope), session_or_request_id(scope, request_log.request_id)
                call = self.resolver.resolve(
                    principal,
                    asked.model,
                    request_log,
                    JOB_OF[dialect.kind],
                    begin_by,
                    conversation,
                    autoload=read_autoload(scope),
                )
                async with until_disconnect(receive):
                    request, call = await self.media.prepare_pooled(asked.request, call, body.hold)
                    before = body.num_bytes

                    def hold(num_bytes: int, width: int) -> None:
                        body.hold_at_least(before + answer_bytes(num_bytes, width))

                    async with self.pipeline.permitted(call, request, request_log) as permitted:
                        result = await self.pipeline.pool(permitted, request, request_log.answer, hold)
                        request_log.usage = Usage(sum(result.num_tokens), 0, 0)
                    request_log.meter.note_begun(request_log.usage, request_log.answer)
                    hold(len(result.vectors), result.width)
                    await send_parts(send, dialect.parts(asked, call, result), JSON, request_log)

        return handle

    def count_tokens(self, read: PromptReader, fields: Mapping[str, str]) -> Handler:
        """Return the handler of a route that counts a prompt's tokens. `fields`: further fields of the answer."""

        async def handle(principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
            request_log = request_log_of(scope)
            async with self.intake.open_body(principal, scope, receive, takes_media=True) as body:
                self.resolver.begin(principal, request_log)
                name, request = await body.decode(lambda raw: read(raw, request_log.ignored, body.attachments))
                call = self.media.check(self.resolver.resolve(principal, name, request_log), (request,))
                async with until_disconnect(receive):
                    (request,) = await self.media.load(call, (request,), body.hold)
                    num_tokens = await self.queries.num_tokens(call.model, request, principal.team)
            await send_json(send, {**fields, "input_tokens": num_tokens}, request_log)

        return handle
