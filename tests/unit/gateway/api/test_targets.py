"""Where the workers are, told to anybody who asks: written once for each picture of the fleet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message, Scope

from gateway.access.keys import Keys
from gateway.api.diagnostics import begin_trail
from gateway.api.metrics import ScrapeAccess, Targets
from gateway.registry.snapshot import FleetSnapshot
from tests.support.ranked import worker
from workers.tracing.tracer import OFF


@dataclass
class Fleet:
    snapshot: FleetSnapshot = field(default_factory=FleetSnapshot)


async def told(targets: Targets) -> bytes:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    scope: Scope = {"type": "http", "method": "GET", "path": "/metrics/targets", "headers": []}
    begin_trail(scope, OFF)
    await targets(scope, receive, send)
    body: Any = sent[1]["body"]
    assert isinstance(body, bytes)
    return body


async def test_one_picture_is_written_once() -> None:
    fleet = Fleet(FleetSnapshot({"m": (worker("a"),)}))
    targets = Targets(fleet, ScrapeAccess(Keys(), ""))
    first = await told(targets)
    assert b'"worker":"a"' in first
    assert await told(targets) is first
    fleet.snapshot = FleetSnapshot({"m": (worker("a"), worker("b"))})
    assert b'"worker":"b"' in await told(targets)
