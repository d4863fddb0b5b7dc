"""The ASGI application where a real client could not easily be made to misbehave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import httpx2
from prometheus_client import CollectorRegistry
from starlette.types import Message

from tests.support.calls import generate_calls
from workers.chat.prompts import Prompts
from workers.chat.template import ChatTemplate
from workers.engine.counters import EngineCounters
from workers.engine.request import EngineLoad, EngineRequest
from workers.metrics.worker import WorkerMetrics
from workers.protocol.control import access_token
from workers.protocol.framing import SUBMIT_PATH
from workers.service.calls.stream import EventHub
from workers.service.lifecycle import Shortage
from workers.service.routes.app import MAX_SUBMIT_BYTES, CallRoutes, WorkerAccess, build_app

ACCESS = WorkerAccess("s", "w", "boot")


class Nothing:
    """An engine and a tokenizer that are never asked."""

    n_ctx = 1

    def submit(self, request: EngineRequest) -> None:
        raise AssertionError

    def cancel(self, key: int) -> None:
        raise AssertionError

    def end(self, key: int, num_tokens: int) -> None:
        raise AssertionError

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool, most: int | None = None) -> Sequence[int]:
        raise AssertionError


async def test_a_body_without_end_is_refused_at_the_bound() -> None:
    metrics = WorkerMetrics(CollectorRegistry(), "m", lambda: EngineLoad(1, 0, 0, 1, 0), EngineCounters)
    calls, _, hub = generate_calls(Nothing(), Prompts(ChatTemplate(None), Nothing()), metrics)
    routes = CallRoutes(calls, "boot").routes()
    app = build_app(hub=hub, metrics=metrics, access=ACCESS, shortage=Shortage(), routes=routes)
    chunk = b" " * (8 << 20)
    num_bytes = 0
    answers: list[Message] = []

    async def receive() -> Message:
        nonlocal num_bytes
        num_bytes += len(chunk)
        return {"type": "http.request", "body": chunk, "more_body": True}

    async def send(message: Message) -> None:
        answers.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": SUBMIT_PATH,
        "raw_path": SUBMIT_PATH.encode(),
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {access_token('s', 'w', 'boot')}".encode())],
        "server": ("127.0.0.1", 1),
        "client": ("127.0.0.1", 2),
    }
    await app(scope, receive, send)
    assert num_bytes <= MAX_SUBMIT_BYTES + len(chunk)
    assert answers[0]["status"] == 400
    assert str(MAX_SUBMIT_BYTES).encode() in answers[1]["body"]


async def test_scrapes_that_come_together_share_a_page() -> None:
    num_rendered = 0

    def load() -> EngineLoad:
        nonlocal num_rendered
        num_rendered += 1
        time.sleep(0.02)
        return EngineLoad(1, 0, 0, 1, 0)

    hub = EventHub("boot", print, grace_s=1)
    metrics = WorkerMetrics(CollectorRegistry(), "m", load, EngineCounters)
    transport = httpx2.ASGITransport(build_app(hub=hub, metrics=metrics, access=ACCESS, shortage=Shortage(), routes=[]))
    async with httpx2.AsyncClient(transport=transport, base_url="http://worker") as http:
        alone = (await http.get("/metrics")).text
        num_of_one, num_rendered = num_rendered, 0
        pages = [page.text for page in await asyncio.gather(*(http.get("/metrics") for _ in range(10)))]
    assert num_rendered <= 2 * num_of_one
    assert len(set(pages)) <= 2
    assert 'vllm:num_requests_running{model_name="m"}' in alone
