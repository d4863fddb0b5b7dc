"""What a generating route tells of a request before it is placed."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from starlette.types import Message, Scope

from gateway.api.call_handlers import CallHandlers
from gateway.api.http.diagnostics import begin_request_log
from gateway.api.http.streaming import Pings
from gateway.api.intake.decoding import DecodingThread
from gateway.api.intake.intake import Intake
from gateway.api.intake.memory_budget import MemoryBudget
from gateway.api.openai.dialects import ChatDialect
from gateway.call import Principal
from gateway.dispatch.slot_search import INLINE_HELD_BYTES
from gateway.errors import ModelNotFound
from workers.tracing.tracer import NoTracer

ASKER = Principal("key", "red", None, admin=False)


class Resolver:
    """Makes no call, and keeps what it was told of the request."""

    held_bytes = 0

    def begin(self, *about: object) -> None:
        """Nothing has to be known before a body is read."""

    def resolve(
        self, principal: Principal, model: str, *more: object, adapters: object, held_bytes: int, autoload: bool | None
    ) -> None:
        self.held_bytes = held_bytes
        raise ModelNotFound("none")


@pytest.mark.parametrize(("num_messages", "is_much"), [(100, False), (10_000, True)])
async def test_it_tells_what_the_body_takes(num_messages: int, is_much: bool) -> None:
    """By which it is found out where it may be hashed."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * num_messages
    raw = json.dumps({"model": "m", "messages": messages}).encode()
    scope: Scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    begin_request_log(scope, NoTracer())
    intake, resolver = Intake(8 << 20, MemoryBudget(1 << 30), DecodingThread(), lambda: 4096), Resolver()
    nobody = cast(Any, None)
    calls = CallHandlers(cast(Any, resolver), nobody, intake, Pings(15.0), nobody, nobody, nobody)

    async def receive() -> Message:
        return {"type": "http.request", "body": raw}

    with pytest.raises(ModelNotFound):
        await calls.generate(ChatDialect())(ASKER, scope, receive, nobody)
    assert (resolver.held_bytes > INLINE_HELD_BYTES) == is_much
    assert resolver.held_bytes >= len(raw)
