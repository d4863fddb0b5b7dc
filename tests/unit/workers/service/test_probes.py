"""What a worker answers to probes, and to whoever drains it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import httpx2
from starlette.applications import Starlette

from workers.service.lifecycle import Lifecycle
from workers.service.routes.probes import SETTLE_S, Probes


@dataclass
class Calls:
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    num_calls: int = 1


class Worker:
    """The probes of a worker that runs one call."""

    def __init__(self) -> None:
        self.calls = Calls()
        self.life = Lifecycle()
        self.registered = asyncio.Event()
        self.hung_s = 0.0
        probes = Probes(
            *(lambda: {"status": "ok"}, self.life, self.calls, self.registered, self._drain, lambda: self.hung_s),
            "0badcafe",
        )
        transport = httpx2.ASGITransport(Starlette(routes=probes.routes()))
        self.http = httpx2.AsyncClient(transport=transport, base_url="http://worker")

    def _drain(self) -> None:
        self.life.drain()

    def end_call(self) -> None:
        self.calls.num_calls = 0
        self.calls.idle.set()

    async def said(self, path: str) -> tuple[int, str]:
        answer = await self.http.get(path)
        return answer.status_code, answer.json()["status"]


async def test_ready_when_it_is_registered_and_until_it_drains() -> None:
    worker = Worker()
    assert await worker.said("/ready") == (503, "starting")
    assert await worker.said("/health") == (200, "ok")
    worker.registered.set()
    assert await worker.said("/ready") == (200, "ready")
    worker.life.draining = True
    assert await worker.said("/ready") == (503, "draining")
    assert await worker.said("/health") == (200, "ok")


async def test_not_ready_while_it_is_reserved() -> None:
    worker = Worker()
    worker.registered.set()
    assert worker.life.reserve(True)
    assert not worker.life.reserve(True)
    assert await worker.said("/ready") == (503, "reserved")
    assert worker.life.reserve(False)
    assert await worker.said("/ready") == (200, "ready")


async def test_an_engine_that_hangs_is_neither_alive_nor_ready() -> None:
    worker = Worker()
    worker.registered.set()
    worker.hung_s = 2.5
    assert await worker.said("/ready") == (503, "hung")
    assert await worker.said("/health") == (503, "hung")
    assert (await worker.http.get("/health")).json()["hung_s"] == 2.5


async def test_draining_is_over_with_the_last_call() -> None:
    worker = Worker()
    asked = asyncio.create_task(worker.http.post("/health/drain"))
    await asyncio.sleep(SETTLE_S + 0.1)
    assert worker.life.draining
    assert not asked.done()
    worker.end_call()
    answer = (await asked).json()
    assert (answer["status"], answer["calls"]) == ("drained", 0)
    assert answer["waited_s"] >= SETTLE_S


async def test_calls_that_are_on_their_way_are_waited_for_where_nothing_runs() -> None:
    worker = Worker()
    worker.end_call()
    began = time.monotonic()
    assert (await worker.http.post("/health/drain")).json()["status"] == "drained"
    assert time.monotonic() - began >= SETTLE_S


async def test_who_has_it_leave_is_answered_at_once() -> None:
    worker = Worker()
    worker.registered.set()
    assert not worker.life.leaving.is_set()
    for _ in range(2):  # once more is harmless
        answer = await worker.http.post("/v1/leave")
        assert (answer.status_code, answer.json()) == (200, {"boot": "0badcafe", "num_calls": 1})
        assert worker.life.leaving.is_set()
    assert await worker.said("/ready") == (503, "draining")


async def test_whoever_can_not_wait_is_told_what_runs() -> None:
    worker = Worker()
    answer = (await worker.http.post("/health/drain?timeout_s=0.1")).json()
    assert (answer["status"], answer["calls"]) == ("draining", 1)
    assert worker.life.draining
    for wrong in ("soon", "-1", "nan", "1e9"):
        refused = await worker.http.post(f"/health/drain?timeout_s={wrong}")
        assert (refused.status_code, refused.json()["param"]) == (400, "timeout_s")
