"""Messages of a WebSocket that are refused begin in turns, as those that are answered."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry

from gateway.access.team_starts import STARTS_PER_TURN, TeamStarts
from gateway.api.dialect import SHAPE
from gateway.api.http.diagnostics import begin_request_log
from gateway.api.http.sockets import Socket
from gateway.api.openai.writing import OPENAI
from gateway.api.responses.socket.connection import Bounds, Connection, SharedParts
from gateway.api.responses.socket.memory import Memories
from gateway.call import Principal
from gateway.errors import InvalidRequest
from gateway.telemetry.metrics import Metrics
from workers.tracing.tracer import OFF

NUM_MESSAGES = 10 * STARTS_PER_TURN
RED = Principal("key", "red", frozenset(), admin=False)


class Intake:
    """Refuses every message before anything of it is read, as one of a team whose share is full."""

    max_body_bytes = 1 << 20

    def message(self, principal: Principal, raw: bytes) -> Any:
        raise InvalidRequest("The message is too long.")


async def test_refused_messages_take_their_turns() -> None:
    """They were answered in one turn of the event loop, however many had come."""
    turn, refused_in = 0, Counter[int]()

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if refused_in.total() < NUM_MESSAGES:
            asyncio.get_running_loop().call_soon(count_turns)

    messages = iter([{"type": "websocket.receive", "text": "{}"}] * NUM_MESSAGES)

    async def receive() -> Any:
        return next(messages, {"type": "websocket.disconnect"})

    async def send(message: Any) -> None:
        assert json.loads(message["text"])["error"]["message"] == "The message is too long."
        refused_in[turn] += 1

    scope: dict[str, Any] = {"type": "websocket", "method": "GET", "path": "/v1/responses", "headers": []}
    scope[SHAPE] = OPENAI
    begin_request_log(scope, OFF)
    parts = SharedParts(
        calls=cast(Any, SimpleNamespace(intake=Intake(), pipeline=None, pings=None, resumable=None)),
        access=cast(Any, SimpleNamespace(authenticate=lambda scope: RED, starts=TeamStarts())),
        preparation=cast(Any, None),
        store=cast(Any, None),
        memories=Memories(1 << 20),
        metrics=Metrics(CollectorRegistry()),
        bounds=Bounds(max_bytes=1 << 20, idle_s=10.0, life_s=10.0),
    )
    count_turns()
    await Connection(parts, Socket(receive, send), scope, "req-1").run()
    assert refused_in.total() == NUM_MESSAGES
    assert max(refused_in.values()) <= STARTS_PER_TURN
