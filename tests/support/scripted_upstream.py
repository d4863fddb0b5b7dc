"""A second `Upstream`, in this process: it computes nothing, and answers each call with what a test has scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from gateway.call import Call, Push
from gateway.errors import QueueTimeout
from gateway.registry.snapshot import FleetView
from gateway.routing.placement import PlacementRequest, Ranking
from workers.protocol.events import CallEvent, CallFailed, Failed, Failure, Finished
from workers.protocol.heartbeat import WorkerAddress
from workers.protocol.pooled import PoolRequest, PoolResult
from workers.protocol.requests import GenerateRequest

Script = tuple[CallEvent, ...] | Failure | PoolResult
"""The events of an answer, which goes on for ever if none of them ends it; a refusal; a result of pooled work."""


class PlainAnswer:
    """An answer whose events are all there from the start."""

    choice = num_unread = 0

    def __init__(self, events: Iterable[CallEvent], on_end: Callable[[Finished | Failed], None]) -> None:
        self._events = list(events)
        self._on_end = on_end
        self.end: Finished | Failed | None = None

    @property
    def ended(self) -> bool:
        return self.end is not None

    async def peek(self, past: type[CallEvent] | tuple[()] = ()) -> CallEvent:
        for event in self._events:
            if not isinstance(event, past):
                return event
        await asyncio.Event().wait()  # for ever
        raise AssertionError

    async def take(self, push: Push | None = None) -> list[CallEvent]:
        await self.peek()
        events, self._events = self._events, []
        if isinstance(last := events[-1], Finished | Failed):
            self.end = last
            self._on_end(last)
        return events


@dataclass
class ScriptedUpstream:
    scripts: dict[str, list[Script]]
    """Worker -> what becomes of the calls that go there, in order."""
    started: list[str] = field(default_factory=list)
    """Workers that were asked, in order."""
    cancelled: list[str] = field(default_factory=list)
    asked: list[GenerateRequest | PoolRequest] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)

    @property
    def any_lost(self) -> bool:
        return bool(self.lost)

    def is_lost(self, boot: str) -> bool:
        return boot in self.lost

    @asynccontextmanager
    async def start(
        self,
        at: WorkerAddress,
        call: Call,
        request: GenerateRequest,
        *,
        on_end: Callable[[Finished | Failed], None],
        **_: Any,
    ) -> AsyncIterator[PlainAnswer]:
        script = self._next(at, request)
        assert isinstance(script, tuple)
        answer = PlainAnswer(script, on_end)
        try:
            yield answer
        finally:
            if not answer.ended:
                self.cancelled.append(at.worker)

    async def pool(
        self, at: WorkerAddress, call: Call, request: PoolRequest, context: object, hold: Callable[[int], None]
    ) -> PoolResult:
        script = self._next(at, request)
        assert isinstance(script, PoolResult)
        hold(len(script.vectors))
        return script

    def _next(self, at: WorkerAddress, request: GenerateRequest | PoolRequest) -> Script:
        self.started.append(at.worker)
        self.asked.append(request)
        script = self.scripts[at.worker].pop(0)
        if isinstance(script, Failure):
            raise CallFailed(script)
        return script


@dataclass(slots=True)
class PlainLease:
    at: WorkerAddress
    ranking: Ranking = field(default_factory=lambda: Ranking(()))
    overtaken: int = 0
    predicted: float = 40.0
    charged: list[float | None] = field(default_factory=list)

    def give_back(self, took: float | None) -> None:
        if not self.charged:
            self.charged.append(took)


@dataclass(slots=True)
class PlainAdmission:
    """Gives each call the first worker of its model that it need not avoid."""

    fleet: FleetView
    leases: list[PlainLease] = field(default_factory=list)
    num_held: int = 0

    @asynccontextmanager
    async def slot(
        self,
        call: Call,
        avoid: frozenset[str],
        placement_request: PlacementRequest,
        priority: int,
        standing: object,
        avoid_now: object,
    ) -> AsyncIterator[PlainLease]:
        beats = self.fleet.snapshot.of(call.model)
        beat = next((beat for beat in beats if beat.worker not in avoid), None)
        if beat is None:
            raise QueueTimeout("no slot")
        self.leases.append(PlainLease(beat.at))
        self.num_held += 1
        try:
            yield self.leases[-1]
        finally:
            self.num_held -= 1

    def predicted_wait_s(self, model: str) -> float:
        return 0.0

    def may_load(self, model: str) -> bool:
        return False

    def want(self, model: str) -> None:
        """Nothing loads models here."""
