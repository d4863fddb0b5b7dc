"""Questions about texts, and prompts of calls, while one team's crowd holds the lane."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest
from starlette.types import Message, Receive

from tests.contract.messages import MESSAGES
from tests.unit.workers.service.test_generate import Bench, submit
from workers.chat.prompts import Prompts
from workers.chat.template import ChatTemplate
from workers.protocol.events import CallFailed
from workers.protocol.queries import TOKENIZE_PATH, Props, Tokenize
from workers.protocol.requests import Cancel
from workers.service.calls.lanes import media_lane, prompt_lane
from workers.service.calls.live_calls import Begun
from workers.service.routes.text import SHORT_BYTES, TextRoutes, Texts

LONG = "a " * SHORT_BYTES


class SlowTokenizer:
    """Tokenises what begins with `slow` when it is let, and anything else at once."""

    num_tokens = 10

    def __init__(self) -> None:
        self.open = threading.Event()
        self.seen: list[str] = []

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool, most: int | None = None) -> Sequence[int]:
        self.seen.append(text.split()[0])
        if text.startswith("slow"):
            assert self.open.wait(20)
        return [1]

    def special_piece(self, token: int) -> bytes:
        return b"a"

    def join(self, tokens: Sequence[int]) -> bytes:
        return b"a" * len(tokens)


class Peer:
    """One request, over raw ASGI, so that its peer can go away."""

    def __init__(self, app: Any, asked: Tokenize) -> None:
        self.gone = asyncio.Event()
        self.status = 0
        self._body = msgspec.json.encode(asked)
        scope = {
            "type": "http",
            "method": "POST",
            "path": TOKENIZE_PATH,
            "headers": [],
            "query_string": b"",
            "root_path": "",
        }
        self.task = asyncio.create_task(app(scope, self._receive(), self._send))

    def _receive(self) -> Receive:
        messages: list[Message] = [{"type": "http.request", "body": self._body, "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await self.gone.wait()
            return {"type": "http.disconnect"}

        return receive

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]


@pytest.fixture
async def slow() -> AsyncIterator[SlowTokenizer]:
    slow = SlowTokenizer()
    yield slow
    slow.open.set()


def routes(slow: SlowTokenizer) -> Any:
    props = MESSAGES["props.json"]
    assert isinstance(props, Props)
    texts = Texts(slow, Prompts(ChatTemplate(None), slow, num_tokens=10))
    return TextRoutes(texts, props, prompt_lane(), media_lane()).routes()[0].app


async def test_a_crowd_of_slow_texts_does_not_hold_up_another_team(slow: SlowTokenizer) -> None:
    app = routes(slow)
    crowd = [Peer(app, Tokenize(content=f"slow {LONG}", tenant="crowd")) for _ in range(8)]
    async with asyncio.timeout(10):
        while "slow" not in slow.seen:  # noqa: ASYNC110 - a thread tells nobody
            await asyncio.sleep(0.005)
        other = Peer(app, Tokenize(content=f"quick {LONG}", tenant="other"))
        await other.task
    assert other.status == 200
    assert slow.seen == ["slow", "quick"]
    for peer in crowd[1:]:
        peer.gone.set()
    await asyncio.gather(*(peer.task for peer in crowd[1:]))
    slow.open.set()
    await crowd[0].task
    assert crowd[0].status == 200
    assert slow.seen == ["slow", "quick"], "what peers that left had asked was tokenised"


async def test_a_call_that_is_cancelled_in_line_is_never_rendered() -> None:
    bench = Bench()
    began, open_ = threading.Event(), threading.Event()
    num_tokenised = 0

    def before() -> None:
        nonlocal num_tokenised
        num_tokenised += 1
        began.set()
        assert open_.wait(20)

    bench.tokenizer.before = before
    first = asyncio.create_task(bench.calls.submit(submit(1)))
    await asyncio.to_thread(began.wait, 20)
    second = asyncio.create_task(bench.calls.submit(submit(2)))
    await asyncio.sleep(0.05)
    bench.calls.cancel(Cancel(gateway="g", calls=(2,)))
    with pytest.raises(CallFailed, match="was cancelled"):
        async with asyncio.timeout(10):
            await second
    open_.set()
    assert await first == Begun(4)
    await asyncio.sleep(0.05)
    assert num_tokenised == 1
    bench.hub.check_integrity()
