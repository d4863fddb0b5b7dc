"""How bodies of the worker protocol are read."""

from __future__ import annotations

import threading

import msgspec
import pytest
from starlette.requests import Request
from starlette.types import Message

from workers.http_server import protocol
from workers.http_server.state import Refusal
from workers.protocol.events import Failure, FailureCode
from workers.service.routes.bodies import INLINE_BYTES, received, refusal_body


@pytest.mark.parametrize(
    ("numbers", "is_inline"),
    [([0.5] * 5_000, True), ([0.5] * 50_000, False), (["a" * 200_000], True), (["a" * INLINE_BYTES], False)],
)
async def test_what_takes_more_than_a_moment_is_decoded_on_a_thread(numbers: list[object], is_inline: bool) -> None:
    """Reading a float by Python takes ten times as long as msgspec's reading of most."""
    body = msgspec.json.encode(numbers)

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    asked = await received(Request({"type": "http"}, receive), len(body), lambda _: threading.current_thread())
    assert (asked is threading.main_thread()) == is_inline


@pytest.mark.parametrize("refused", [one for one in vars(protocol).values() if isinstance(one, Refusal)])
def test_what_the_server_refuses_is_neither_a_fault_nor_a_wait_of_the_gateways_caller(refused: Refusal) -> None:
    failure = msgspec.json.decode(refusal_body(refused), type=Failure)
    assert failure.code is FailureCode.UNAVAILABLE
    assert refused.message in failure.message
