"""Where the workers are, told to anybody who asks: written once for each picture of the fleet."""

from __future__ import annotations

from typing import Any

from starlette.types import Message, Scope

from gateway.access.control import NOBODY
from gateway.api.http.diagnostics import begin_request_log
from gateway.api.operations.metrics import Targets
from gateway.registry.snapshot import FleetSnapshot
from tests.support.ranked import worker
from tests.support.still_fleet import StillFleet
from workers.tracing.tracer import OFF


async def told(targets: Targets) -> bytes:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    scope: Scope = {"type": "http", "method": "GET", "path": "/metrics/targets", "headers": []}
    begin_request_log(scope, OFF)
    await targets.answer(NOBODY, scope, receive, send)
    body: Any = sent[1]["body"]
    assert isinstance(body, bytes)
    return body


async def test_one_picture_is_written_once() -> None:
    fleet = StillFleet(FleetSnapshot({"m": (worker("a"),)}))
    targets = Targets(fleet)
    first = await told(targets)
    assert b'"worker":"a"' in first
    assert await told(targets) is first
    fleet.snapshot = FleetSnapshot({"m": (worker("a"), worker("b"))})
    assert b'"worker":"b"' in await told(targets)
