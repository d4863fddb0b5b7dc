"""Reading a request's body: how slow it may be, and what its sender is told then."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc

import pytest
from starlette.types import Message, Receive, Scope, Send

from gateway.api.body import read_body
from gateway.api.door import Door
from gateway.api.drain import Attendance
from gateway.errors import BodyTooSlow
from gateway.telemetry.metrics import Metrics

TIMEOUT_S = 0.1
NUM_PARTS = 30
SCOPE: Scope = {"type": "http", "method": "POST", "path": "/", "headers": []}


class Sender:
    """Never idle for long, and not complete within `TIMEOUT_S`."""

    def __init__(self) -> None:
        self.num_sent = 0

    async def receive(self) -> Message:
        await asyncio.sleep(0.01)
        self.num_sent += 1
        return {"type": "http.request", "body": b" ", "more_body": self.num_sent < NUM_PARTS}


async def test_a_body_that_trickles_in_is_given_up() -> None:
    sender, began = Sender(), time.monotonic()
    with pytest.raises(BodyTooSlow, match=r"within 0\.1 s"):
        await read_body(dict(SCOPE), sender.receive, 1000, TIMEOUT_S)
    assert time.monotonic() - began >= TIMEOUT_S
    assert sender.num_sent < NUM_PARTS


async def test_one_that_takes_its_time_within_the_bound_is_read() -> None:
    assert await read_body(dict(SCOPE), Sender().receive, 1000, 60.0) == b" " * NUM_PARTS


async def test_a_large_body_is_put_together_while_it_comes() -> None:
    """Joined at its end, it took twice its memory, and the loop as long as all of its parts together."""
    num_parts, num_sent = 64, 0

    async def receive() -> Message:
        nonlocal num_sent
        num_sent += 1
        return {"type": "http.request", "body": b"x" * (64 << 10), "more_body": num_sent < num_parts}

    tracemalloc.start()
    try:
        body = await read_body(dict(SCOPE), receive, 8 << 20)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert body == b"x" * (4 << 20)
    assert most < 1.5 * len(body)


async def test_its_sender_is_told_and_the_connection_closed() -> None:
    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(scope, receive, 1000, TIMEOUT_S)

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    sender = Sender()
    await Door(inside, Metrics(), Attendance())(dict(SCOPE), sender.receive, send)
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"]["code"] == "request_body_timeout"
    assert sender.num_sent == NUM_PARTS, "the rest is read away, so that the refusal is not lost to a reset"
