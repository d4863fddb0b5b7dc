"""The corridor of one call: its name, its permission, a slot, a worker, the answer; and its end, whatever that is.

call = pipeline.call(...)                           who asks for what, until when
async with pipeline.answer(call, request, trail) as answer:
    async for events in answer: ...                 lists of events; leaving the block is the cancellation
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from msgspec.structs import replace as replace_struct

from gateway.call import Call, Principal
from gateway.catalog.adapters import uses_of
from gateway.catalog.kinds import check_kind
from gateway.catalog.names import Names
from gateway.errors import ClientTooSlow, Stopping
from gateway.registry.adapter_names import known_adapters
from gateway.relay.cutoff import Cutoff
from gateway.relay.failures import answer_to
from gateway.relay.fanin import Place
from gateway.relay.relay import Relay
from gateway.routing.fit import unfit
from gateway.routing.slot_numbers import ANY, located
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.trail import Trail
from workers.protocol.events import CallEvent, Failed, Finished, Started
from workers.protocol.failures import RETRYABLE, CallFailed, Failure, FailureCode
from workers.protocol.heartbeat import Heartbeat, WorkerKind
from workers.protocol.pooled import POOL_PATH, PoolRequest, PoolResult, decode_result
from workers.protocol.requests import AdapterUse, GenerateRequest

MAX_ATTEMPTS = 4
MAX_LOST = 2
"""Workers that may be lost under one call before it is given up: it may be what ends them."""
REST_S = 0.1
"""How long a worker that refused a call, or lost it, is left alone by that call."""
LOOK_AGAIN_S = 0.05


class Lease(Protocol):
    """A slot on a worker."""

    @property
    def worker(self) -> str: ...
    @property
    def boot(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def queue_ms(self) -> float: ...


class Admission(Protocol):
    def slot(self, call: Call, avoid: frozenset[str] = ...) -> AbstractAsyncContextManager[Lease]: ...


class Snapshot(Protocol):
    @property
    def models(self) -> frozenset[str]: ...

    @property
    def workers(self) -> Mapping[str, tuple[Heartbeat, ...]]: ...

    @property
    def adapters(self) -> Mapping[str, str]:
        """Adapter -> model, for those that can be called by name."""
        ...


class AdapterScales(Protocol):
    def scales(self, model: str) -> Mapping[str, float]:
        """Of the adapters that calls use which name none."""
        ...


class Fleet(Protocol):
    @property
    def snapshot(self) -> Snapshot: ...


@dataclass(frozen=True, slots=True)
class Limits:
    queue_timeout_s: float
    request_timeout_s: float


class Answer(Protocol):
    """The events of a call that has begun."""

    @property
    def ended(self) -> bool: ...
    @property
    def choice(self) -> int: ...
    @property
    def end(self) -> Finished | Failed | None:
        """The last event, when it has been taken."""
        ...

    async def take(self) -> list[CallEvent]:
        """What has come since the last time; waits for it. The last list ends in `Finished` or `Failed`."""
        ...


@dataclass(slots=True)
class Tries:
    """What one call has been through."""

    call: Call
    queue_timeout_s: float
    num_lost: int = 0
    resting: dict[str, float] = field(default_factory=dict)
    """Boot id -> time.monotonic() until which this call leaves that worker process alone."""
    adapters: frozenset[str] = frozenset()
    """Those that it needs."""
    slot: int = ANY
    """The one that it would like, numbered over the model's workers."""

    def rest(self, boot: str, failure: Failure) -> None:
        now = time.monotonic()
        self.resting[boot] = float("inf") if failure.code is FailureCode.DRAINING else now + REST_S
        # Losing a worker is not the caller's fault: it may wait for a slot once more.
        self.call = replace(self.call, queue_deadline=min(self.call.deadline, now + self.queue_timeout_s))


class Pipeline:
    """Takes every call of this gateway process through the corridor."""

    def __init__(
        self,
        names: Names,
        fleet: Fleet,
        admission: Admission,
        relay: Relay,
        metrics: Metrics,
        limits: Limits,
        adapters: AdapterScales,
    ) -> None:
        self._names = names
        self._fleet = fleet
        self._adapters = adapters
        self._admission = admission
        self._relay = relay
        self._metrics = metrics
        self._limits = limits
        self._under_way: set[Cutoff] = set()
        self._stopping = False

    @property
    def num_calls(self) -> int:
        return len(self._under_way)

    @property
    def stopping(self) -> bool:
        return self._stopping

    def stop_taking(self) -> None:
        """From now on new calls are refused; those under way go on."""
        self._stopping = True

    def cut_all(self) -> None:
        """End every call under way with an error that its client sees."""
        for cutoff in self._under_way:
            cutoff.cut(Stopping("This gateway stopped before the answer was complete. Send the request again."))

    def call(
        self, principal: Principal, alias: str, trail: Trail, kind: WorkerKind | None = None, begin_by: float = 0.0
    ) -> Call:
        """With no `alias`: the only model there is. `kind`: what the model is to do; None: what any model can.

        `begin_by` as in `Call`. Raises Stopping, ModelNotFound, PermissionDenied, NotSupported where the model does
        something else.
        """
        if self._stopping:
            raise Stopping("This gateway is stopping. Send the request again.", retry_after_s=1.0)
        fleet = self._fleet.snapshot
        model = self._names.resolve(alias, principal, fleet.models, fleet.adapters, fleet.workers)
        alias = alias or model
        trail.alias, trail.model = alias, model
        if kind is not None:
            check_kind(alias, kind, fleet.workers.get(model, ()))
        return Call(
            request_id=trail.request_id,
            principal=principal,
            alias=alias,
            model=model,
            received_at=trail.received_at,
            deadline=trail.received_at + self._limits.request_timeout_s,
            queue_deadline=trail.received_at + self._limits.queue_timeout_s,
            begin_by=begin_by,
            adapter=alias if self._names.is_adapter(alias, fleet.models, fleet.adapters) else "",
        )

    def adapters(self, call: Call, asked: tuple[AdapterUse, ...]) -> tuple[AdapterUse, ...]:
        """What a call computes with that asks for these, by name. Raises InvalidRequest for one that is not known."""
        scales = self._adapters.scales(call.model)
        if not (asked or call.adapter or scales):
            return ()
        known = known_adapters(self._fleet.snapshot.workers.get(call.model, ()))
        return uses_of(asked, call.adapter, scales, known)

    @asynccontextmanager
    async def answer(self, call: Call, request: GenerateRequest, trail: Trail) -> AsyncIterator[Answer]:
        """Place the call, again on another worker while that is safe, and hand out its answer once it has begun.

        Raises PaddockError: no slot in time, refused by the worker, failed, cut off.
        """
        request = self._adapted(call, request)
        cutoff = self._cutoff(call)
        with self._metrics.in_flight.labels(call.model).track_inprogress():
            self._under_way.add(cutoff)
            try:
                async with cutoff, self._placed(call, request, trail, cutoff) as answer:
                    yield answer
            finally:
                self._under_way.discard(cutoff)

    async def pool(self, call: Call, request: PoolRequest, trail: Trail) -> PoolResult:
        """Pooled work, which is one answer: placed like any call, and anew where its worker is lost.

        Raises PaddockError.
        """
        request = replace_struct(request, tenant=call.principal.team, request_id=call.request_id)
        cutoff = self._cutoff(call)
        with self._metrics.in_flight.labels(call.model).track_inprogress():
            self._under_way.add(cutoff)
            try:
                async with cutoff:
                    return await self._pooled(call, request, trail)
            finally:
                self._under_way.discard(cutoff)

    async def _pooled(self, call: Call, request: PoolRequest, trail: Trail) -> PoolResult:
        tries = Tries(call, self._limits.queue_timeout_s)
        while True:
            async with self._admission.slot(tries.call, await self._avoided(tries)) as lease:
                place = Place(lease.worker, lease.boot, lease.address.rstrip("/"))
                _note_attempt(trail, lease)
                try:
                    timeout_s = call.deadline - time.monotonic()
                    result = await self._relay.ask(place, "POST", POOL_PATH, request, decode_result, timeout_s)
                except CallFailed as failed:
                    failure = failed.failure
                else:
                    self._metrics.attempts.labels(call.model, "started").inc()
                    return result
            self._try_again(tries, place, failure, trail)

    def _adapted(self, call: Call, request: GenerateRequest) -> GenerateRequest:
        uses = self.adapters(call, request.adapters)
        return request if uses == request.adapters else replace_struct(request, adapters=uses)

    def _in_slot(self, request: GenerateRequest, model: str, worker: str) -> GenerateRequest:
        """The wished slot by the worker's own number; any where it is another worker's."""
        if request.slot == ANY:
            return request
        place = located(request.slot, self._reachable(model))
        own = place[1] if place is not None and place[0].worker == worker else ANY
        return replace_struct(request, slot=own)

    def _cutoff(self, call: Call) -> Cutoff:
        return Cutoff(call.deadline, f"the limit of {self._limits.request_timeout_s:g} s for one request")

    @asynccontextmanager
    async def _placed(
        self, call: Call, request: GenerateRequest, trail: Trail, cutoff: Cutoff
    ) -> AsyncIterator[Answer]:
        tries = Tries(call, self._limits.queue_timeout_s)
        tries.adapters, tries.slot = frozenset(use.name for use in request.adapters), request.slot
        slow = ClientTooSlow("The client reads too slowly: its buffer of events is full, so the answer was cut off.")
        while True:
            async with self._admission.slot(tries.call, await self._avoided(tries)) as lease:
                place = Place(lease.worker, lease.boot, lease.address.rstrip("/"))
                _note_attempt(trail, lease)
                failure: Failure
                try:
                    asked = self._in_slot(request, call.model, lease.worker)
                    async with self._relay.passage(
                        place, asked, call.principal.team, call.request_id, lambda: cutoff.cut(slow), call.begin_by
                    ) as mailbox:
                        first = await mailbox.peek()
                        if not isinstance(first, Failed):
                            self._metrics.attempts.labels(call.model, "started").inc()
                            trail.slot = first.slot if isinstance(first, Started) else None
                            yield mailbox
                            return
                        mailbox.ended = True
                        failure = first.failure
                except CallFailed as failed:
                    failure = failed.failure
            self._try_again(tries, place, failure, trail)

    def _try_again(self, tries: Tries, place: Place, failure: Failure, trail: Trail) -> None:
        """Raises PaddockError where another worker would not help, or enough have been tried."""
        self._metrics.attempts.labels(tries.call.model, failure.code.value).inc()
        tries.num_lost += failure.code is FailureCode.WORKER_LOST
        if failure.code not in RETRYABLE or trail.attempts >= MAX_ATTEMPTS or tries.num_lost >= MAX_LOST:
            raise answer_to(failure)
        tries.rest(place.boot, failure)

    def _reachable(self, model: str) -> list[Heartbeat]:
        """By id: the order in which slots are numbered over a model's workers."""
        beats = self._fleet.snapshot.workers.get(model, ())
        return [beat for beat in beats if not self._relay.is_lost(beat.boot)]

    async def _avoided(self, tries: Tries) -> frozenset[str]:
        """Workers that would not do; while there are no others, waits for one to recover or to be replaced."""
        call = tries.call
        while True:
            now = time.monotonic()
            beats = self._fleet.snapshot.workers.get(call.model, ())
            bad = frozenset(
                beat.worker
                for beat in beats
                if tries.resting.get(beat.boot, 0.0) > now or self._relay.is_lost(beat.boot)
            )
            if len(bad) < len(beats):
                if tries.adapters or tries.slot != ANY:
                    bad |= unfit(self._reachable(call.model), bad, tries.adapters, tries.slot)
                return bad
            if not beats or now >= call.queue_deadline:
                return frozenset()
            await asyncio.sleep(LOOK_AGAIN_S)


def _note_attempt(trail: Trail, lease: Lease) -> None:
    trail.attempts += 1
    trail.worker = lease.worker
    trail.queue_ms += lease.queue_ms
    trail.submitted_at = time.monotonic()
