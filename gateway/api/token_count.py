"""Counts the tokens that a prompt would have, without an answer, in any dialect: a worker renders and counts."""

from __future__ import annotations

from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from gateway.access.keys import Keys
from gateway.api.answers import send_json
from gateway.api.caller import identified
from gateway.api.intake import Intake
from gateway.api.presence import while_present
from gateway.inquiries import Inquiries
from gateway.pipeline import Pipeline
from workers.protocol.requests import GenerateRequest


class CountDialect(Protocol):
    """Reads a dialect's question and writes the answer. Stateless."""

    def read(self, raw: bytes, scope: Scope) -> tuple[str, GenerateRequest]:
        """Return the model's name, and a request with the prompt. Raises PaddockError."""
        ...

    def told(self, num_tokens: int) -> dict[str, Any]: ...


class TokenCount:
    """The ASGI app of the route."""

    def __init__(
        self, dialect: CountDialect, keys: Keys, pipeline: Pipeline, inquiries: Inquiries, intake: Intake
    ) -> None:
        self._dialect = dialect
        self._keys = keys
        self._pipeline = pipeline
        self._inquiries = inquiries
        self._intake = intake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        principal, trail = await identified(self._keys, scope)
        async with self._intake.opened(principal, scope, receive) as body:
            name, request = await body.decoded(lambda raw: self._dialect.read(raw, scope))
            call = self._pipeline.call(principal, name, trail)
            async with while_present(receive):
                num_tokens = await self._inquiries.num_tokens(call.model, request, principal.team)
        await send_json(send, self._dialect.told(num_tokens), trail)
