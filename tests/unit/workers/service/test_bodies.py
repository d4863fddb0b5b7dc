"""How bodies of the worker protocol are read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.types import Message

from workers.http_server import protocol
from workers.http_server.state import Refusal
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.framing import marked_parts
from workers.protocol.pieces import PIECE_BYTES
from workers.protocol.requests import GenerateRequest, Submit, decode_submit
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


@pytest.mark.parametrize("size", [1, 2 * PIECE_BYTES])
async def test_a_body_that_is_no_text_is_refused(size: int) -> None:
    whole = b"".join(marked_parts(Submit(gateway="g", call=1, request=GenerateRequest(prompt="a" * size), tenant="t")))
    sent = asyncio.Queue[Message]()
    for part in (whole[:-20], whole[-20:].replace(b'"t"', b'"\xff"')):
        sent.put_nowait({"type": "http.request", "body": part, "more_body": True})
    sent.put_nowait({"type": "http.request"})
    with pytest.raises(CallFailed, match="does not follow the worker protocol: 'utf-8' codec") as caught:
        await received(Request({"type": "http"}, sent.get), 1 << 30, decode_submit)
    assert caught.value.failure.code is FailureCode.INVALID_REQUEST


@pytest.mark.parametrize(("num_parts", "is_inline"), [(2, True), (3, False)])
async def test_a_long_body_is_joined_on_a_thread(
    num_parts: int, is_inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """45 MiB took the event loop 25 ms."""
    sent, aside = asyncio.Queue[Message](), list[str]()
    to_thread = asyncio.to_thread

    async def counted(work: Callable[..., Any], *given: Any) -> Any:
        aside.append(work.__name__)
        return await to_thread(work, *given)

    monkeypatch.setattr(asyncio, "to_thread", counted)
    for _ in range(num_parts):
        sent.put_nowait({"type": "http.request", "body": b"x" * (INLINE_BYTES // 2), "more_body": True})
    sent.put_nowait({"type": "http.request"})
    assert await received(Request({"type": "http"}, sent.get), 1 << 30, len) == num_parts * INLINE_BYTES // 2
    assert aside == ([] if is_inline else ["join", "decoded"])


@pytest.mark.parametrize("refused", [one for one in vars(protocol).values() if isinstance(one, Refusal)])
def test_what_the_server_refuses_is_neither_a_fault_nor_a_wait_of_the_gateways_caller(refused: Refusal) -> None:
    failure = msgspec.json.decode(refusal_body(refused), type=Failure)
    assert failure.code is FailureCode.UNAVAILABLE
    assert refused.message in failure.message
