"""Reading a request's body: how slow it may be, and what its sender is told then."""

from __future__ import annotations

import asyncio
import json
import re
import time
import tracemalloc
from array import array
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message, Receive, Scope, Send

from gateway.access.control import AccessControl
from gateway.access.keys import Keys
from gateway.api.http.root_app import Door
from gateway.api.intake.body import LONG_BYTES, PACKED_BYTES, decode_json, read_body, read_object
from gateway.api.operations.drain import InFlightRequests
from gateway.errors import BodyTooSlow, InvalidRequest
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
    await Door(inside, Metrics(CollectorRegistry()), InFlightRequests(), AccessControl(Keys()))(
        dict(SCOPE), sender.receive, send
    )
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"]["code"] == "request_body_timeout"
    assert sender.num_sent == NUM_PARTS, "the rest is read away, so that the refusal is not lost to a reset"


LONG = [list(range(20_000)), [1, 2.5, True, None, "x", [3]], [], list(range(20_000))]
VALUES: list[object] = [LONG, [LONG], {"a": LONG}, ["x" * LONG_BYTES], "x" * LONG_BYTES, [[{"a": [1]}], *LONG], None]


@pytest.mark.parametrize("value", VALUES)
def test_a_long_body_is_what_it_would_be_in_one_call(value: object) -> None:
    raw = json.dumps({"prompt": value, "pad": " " * LONG_BYTES, "n": 1}, indent=1).encode()
    assert _listed(read_object(raw)) == decode_json(raw)


def _listed(value: Any) -> Any:
    """Return a value with its arrays as lists."""
    if isinstance(value, dict):
        return {name: _listed(inner) for name, inner in value.items()}
    return [_listed(inner) for inner in value] if isinstance(value, list | array) else value


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": [[1, 2], [3, x]], "pad": "%b"}',
        b'{"prompt": [[1, 2], [3, 4]], "pad": "%b"',
        b'{"pad": "%b", "prompt": [["\\ud800"]]}',
        b'{"pad": "%b", "prompt": [[1e999]]}',
        b'[[1], "%b"]',
        b'{"pad": "%b", "prompt": ' + b"[" * 5000 + b"}",
    ],
)
def test_a_long_body_is_refused_in_the_words_of_a_short_one(raw: bytes) -> None:
    told = []
    for pad in (b"", b" " * LONG_BYTES):
        with pytest.raises(InvalidRequest) as refused:
            read_object(raw % pad)
        told.append(refused.value.message)
    # Where it breaks is counted from its beginning, so that number differs.
    short, long = (re.sub(r"byte \d+", "byte N", each) for each in told)
    assert short == long


def test_prompts_of_tokens_are_decoded_one_at_a_time_into_four_bytes_a_token() -> None:
    prompt = [100_000 + number for number in range(30_000)]
    raw = json.dumps({"prompt": [prompt] * 17}).encode()
    tracemalloc.start()
    try:
        prompts = read_object(raw)["prompt"]
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [list(each) for each in prompts] == [prompt] * 17
    assert all(type(each) is array for each in prompts)
    assert held < 17 * 30_000 * 4 * 1.1
    assert most < held + len(raw) + 64 * 30_000, "no two are Python's numbers at a time"


@pytest.mark.parametrize("odd", [-1, 2**31, 2**63, True, None, 1.0, "a", [1]])
def test_what_is_no_token_stays_as_it_came(odd: object) -> None:
    parts = [*[100] * PACKED_BYTES, odd]
    read = read_object(json.dumps({"prompt": [parts] * 2, "pad": "x" * LONG_BYTES, "logit_bias": [[1, 2]]}).encode())
    assert read["prompt"] == [parts] * 2, "none is an array"
    assert type(read["prompt"][0][-1]) is type(odd)
    assert read["logit_bias"] == [[1, 2]]
