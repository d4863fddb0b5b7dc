"""Answers pooled work over HTTP, in any dialect: one question, one whole answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from gateway.access.keys import Keys
from gateway.api.answers import JSON, send_parts
from gateway.api.caller import identified
from gateway.api.intake import Intake
from gateway.api.presence import while_present
from gateway.api.session import talk_of
from gateway.api.slo import read_begin_by
from gateway.api.vectors import answer_bytes
from gateway.call import Call
from gateway.catalog.kinds import JOB_OF
from gateway.pipeline import Pipeline
from workers.protocol.events import Usage
from workers.protocol.pooled import PoolRequest, PoolResult


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
    """The ASGI app of a route for pooled work."""

    def __init__(self, dialect: PoolDialect[PoolAskedT], keys: Keys, pipeline: Pipeline, intake: Intake) -> None:
        self._dialect = dialect
        self._keys = keys
        self._pipeline = pipeline
        self._intake = intake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        principal, trail = await identified(self._keys, scope)
        async with self._intake.opened(principal, scope, receive) as body:
            asked = await body.decoded(lambda raw: self._dialect.read(raw, scope))
            begin_by, talk = read_begin_by(scope), talk_of(scope, trail.request_id)
            call = self._pipeline.call(principal, asked.model, trail, JOB_OF[asked.request.kind], begin_by, talk)
            async with while_present(receive):
                result = await self._pipeline.pool(call, asked.request, trail)
                trail.usage = Usage(sum(result.num_tokens), 0, 0)
                body.holds(answer_bytes(result))
                await send_parts(send, self._dialect.parts(asked, call, result), JSON, trail)
