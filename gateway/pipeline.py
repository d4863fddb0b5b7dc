"""Takes one call from its model's name through permission, slot and worker to the answer, and ends it in any case.

call = pipeline.call(...)                           who asks for what, until when
async with pipeline.answer(call, request, trail) as answer:
    async for events in answer: ...                 lists of events; leaving the block is the cancellation
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace as replace_struct

from gateway.attempts import Attempts
from gateway.call import Call, CallBounds, Principal
from gateway.catalog.adapters import uses_of
from gateway.catalog.kinds import KIND_OF, of_kind
from gateway.catalog.names import Names
from gateway.errors import ClientTooSlow, Stopping
from gateway.relay.cutoff import Cutoff
from gateway.relay.fanin import Place
from gateway.relay.mailbox import Mailbox
from gateway.relay.relay import Relay
from gateway.routing.chain import Reason
from gateway.routing.slot_numbers import ANY, located
from gateway.team_turns import TeamTurns, Turn
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.prompts import UNWRITTEN, Prompts
from gateway.telemetry.trail import Trail
from gateway.tries import Admission, Lease, Tries, on_model
from workers.protocol.catalog import Job
from workers.protocol.events import CallEvent, Failed, Finished, Started
from workers.protocol.failures import CallFailed, Failure
from workers.protocol.heartbeat import Heartbeat
from workers.protocol.pooled import PoolRequest, PoolResult
from workers.protocol.requests import AdapterUse, GenerateRequest

PLACED_AT_ONCE = 8
"""Calls of a team that may be placed at once, until they have a slot or wait in line.

Placing a call takes the event loop half a millisecond, in pieces. Were hundreds of one team placed side by side, each
piece of another team's call would wait for a piece of all of them. With a round trip to Redis of 1 ms, eight at once
place a team's calls as fast as a gateway can.
"""


MAX_NAME_CHARS = 128
"""Most characters of an unknown model's name that are written into the request's log."""


class Snapshot(Protocol):
    @property
    def models(self) -> frozenset[str]: ...

    @property
    def workers(self) -> Mapping[str, tuple[Heartbeat, ...]]: ...

    @property
    def adapters(self) -> Mapping[str, str]:
        """Adapter -> model, for those that can be called by name."""
        ...

    @property
    def contents(self) -> Mapping[str, Mapping[str, str]]:
        """Model -> adapter -> SHA-256, sorted by name; registered adapters that no worker has yet are included."""
        ...

    @property
    def is_read(self) -> bool:
        """False until all of this was read once."""
        ...


class AdapterScales(Protocol):
    def scales(self, model: str) -> Mapping[str, float]:
        """Return the scales of the adapters that a call uses if it names none."""
        ...


class Fleet(Protocol):
    @property
    def snapshot(self) -> Snapshot: ...


@dataclass(frozen=True, slots=True)
class Limits:
    queue_timeout_s: float
    start_timeout_s: float
    """Longest wait of a call while its model has no worker."""
    request_timeout_s: float
    retry_share: float = 0.2
    """Share of a model's calls that may be tried again on another worker."""
    answer_timeout_s: float = math.inf
    """Most seconds from an answer's first token to its end, where its key does not say."""


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
        """Wait for events, and return those since the last time. The last list ends in `Finished` or `Failed`."""
        ...


class Pipeline:
    """Takes every call of this gateway process from its model's name to the end of its answer."""

    def __init__(
        self,
        names: Names,
        fleet: Fleet,
        admission: Admission,
        relay: Relay,
        metrics: Metrics,
        limits: Limits,
        adapters: AdapterScales,
        prompts: Prompts = UNWRITTEN,
    ) -> None:
        self._names = names
        self._fleet = fleet
        self._adapters = adapters
        self._relay = relay
        self._metrics = metrics
        self._prompts = prompts
        self._limits = limits
        self.attempts = Attempts(
            fleet,
            admission,
            relay,
            metrics,
            self._adapted,
            limits.retry_share,
            queue_s=limits.queue_timeout_s,
            start_s=limits.start_timeout_s,
        )
        self._placing = TeamTurns.of_each(PLACED_AT_ONCE)
        self._under_way: set[Cutoff] = set()
        self._stopping = False

    @property
    def num_calls(self) -> int:
        return len(self._under_way)

    @property
    def stopping(self) -> bool:
        return self._stopping

    def stop_taking(self) -> None:
        """Refuse new calls from now on; those under way go on."""
        self._stopping = True

    def cut_all(self) -> None:
        """End every call under way with an error that its client sees."""
        for cutoff in self._under_way:
            cutoff.cut(Stopping("This gateway stopped before the answer was complete. Send the request again."))

    def call(
        self,
        principal: Principal,
        alias: str,
        trail: Trail,
        job: Job | None = None,
        begin_by: float = 0.0,
        conversation: Callable[[], str] | None = None,
        *,
        strict: bool = False,
    ) -> Call:
        """Make a call; without `alias`, of the default model. `job`: the model's work; None: it is only asked about.

        `begin_by` as in `Call`; `conversation` returns the key that chooses among several models of a name (`shares`).
        `strict` as in `Names.named`.
        Raises Stopping, ModelNotFound, PermissionDenied, NotSupported where the model does something else,
        InvalidRequest where one has to be named.
        """
        if self._stopping:
            raise Stopping("This gateway is stopping. Send the request again.", retry_after_s=1.0)
        fleet = self._fleet.snapshot
        known = (fleet.models, fleet.adapters, fleet.workers)
        named = self._names.named(alias, principal, *known, job=job, strict=strict, complete=fleet.is_read)
        if named.stands_in:
            self._metrics.unknown_models.inc(named.model)
            trail.stands_in = named.name
            trail.record.notes("unknown_model", model=alias[:MAX_NAME_CHARS], default=named.name)
        alias, model = named.name, named.model
        models: tuple[str, ...] = (model,)
        if self._names.is_chain(alias):
            models = self._names.chain(alias, conversation() if conversation is not None else "")
        trail.alias, trail.model, trail.asks_only = alias, models[0], job is None
        kind = None if job is None else KIND_OF[job]
        if kind is not None:
            models = of_kind(alias, kind, models, fleet.workers)
        call = Call(
            request_id=trail.request_id,
            principal=principal,
            alias=alias,
            model=models[0],
            received_at=trail.received_at,
            deadline=trail.received_at + self._limits.request_timeout_s,
            queue_deadline=trail.received_at + self._limits.queue_timeout_s,
            start_deadline=trail.received_at + self._limits.start_timeout_s,
            begin_by=begin_by,
            adapter=alias if self._names.is_adapter(alias, fleet.models, fleet.adapters) else "",
            kind=kind,
            fallbacks=models[1:],
        )
        return self._served(call, trail)

    def _served(self, call: Call, trail: Trail) -> Call:
        """Return the call with the first model of its chain that has a worker, if one has."""
        workers = self._fleet.snapshot.workers
        standing_in = next((model for model in call.fallbacks if workers.get(model)), None)
        if standing_in is not None and not workers.get(call.model):
            self._metrics.fallbacks.inc(call.model, standing_in, Reason.NO_WORKER.value)
            trail.record.notes("fallback", model=call.model, fallback=standing_in, reason=Reason.NO_WORKER.value)
            call = on_model(call, standing_in)
        trail.model = call.model
        return call

    def adapters(self, call: Call, asked: tuple[AdapterUse, ...]) -> tuple[AdapterUse, ...]:
        """Return the adapters that a call is computed with if it asks for `asked` by name.

        Raises InvalidRequest for one that is not known, PermissionDenied for one that the key may not use.
        """
        scales = self._adapters.scales(call.model)
        if not (asked or call.adapter or scales):
            return ()
        known = tuple(self._fleet.snapshot.contents.get(call.model, ()))
        return uses_of(asked, call.adapter, scales, known, call.principal)

    @asynccontextmanager
    async def answer(self, call: Call, request: GenerateRequest, trail: Trail) -> AsyncIterator[Answer]:
        """Place the call, again on another worker while that is safe, and hand out its answer once it has begun.

        Raises PaddockError: no slot in time, refused by the worker, failed, cut off.
        """
        request = _bounded(request, call.principal.bounds, trail)
        cutoff, heard = self._cutoff(call), self._prompts.begins(trail, request)
        self._under_way.add(cutoff)
        turn: Turn | None = None
        try:
            async with cutoff:
                turn = await self._enter(call, trail)
                async with self._placed(call, request, trail, cutoff, turn) as answer:
                    yield heard.of(answer)
        finally:
            if turn is not None:
                turn.leave()
            self._under_way.discard(cutoff)
            heard.ends()

    async def pool(self, call: Call, request: PoolRequest, trail: Trail) -> PoolResult:
        """Return the result of pooled work, which is placed like any call, and again where its worker is lost.

        Raises PaddockError.
        """
        request = replace_struct(request, tenant=call.principal.team, request_id=call.request_id)
        cutoff, heard = self._cutoff(call), self._prompts.begins(trail, request)
        self._under_way.add(cutoff)
        try:
            async with cutoff:
                return await self._pooled(call, request, trail)
        finally:
            self._under_way.discard(cutoff)
            heard.ends()

    async def _pooled(self, call: Call, request: PoolRequest, trail: Trail) -> PoolResult:
        turn = await self._enter(call, trail)
        tries = self.attempts.begin_pooled(call, trail, request)
        try:
            while True:
                async with AsyncExitStack() as held:
                    place = _place(await self.attempts.slot(tries, held))
                    turn.leave()
                    timeout_s, asked = call.deadline - time.monotonic(), _in_trace(request, tries)
                    try:
                        result = await self._relay.pool(place, asked, timeout_s)
                    except CallFailed as failed:
                        failure = failed.failure
                    else:
                        self.attempts.begun(tries, place.boot)
                        self.attempts.complete(place.boot)
                        tries.attempt.over()
                        return result
                self.attempts.failed(tries, place.boot, failure)
        finally:
            turn.leave()
            self.attempts.over(tries)

    async def _enter(self, call: Call, trail: Trail) -> Turn:
        """Wait until few enough calls of the team are being placed."""
        turn = await self._placing.enter(call.principal.team)
        trail.standing.on_wait = turn.leave
        return turn

    def _adapted(self, call: Call, request: GenerateRequest) -> GenerateRequest:
        uses = self.adapters(call, request.adapters)
        return request if uses == request.adapters else replace_struct(request, adapters=uses)

    def _in_slot(self, request: GenerateRequest, model: str, worker: str) -> GenerateRequest:
        """Return the request with its slot in the worker's own numbering; any slot where it is another worker's."""
        if request.slot == ANY:
            return request
        place = located(request.slot, self.attempts.reachable(model))
        own = place[1] if place is not None and place[0].worker == worker else ANY
        return replace_struct(request, slot=own)

    def _cutoff(self, call: Call) -> Cutoff:
        return Cutoff(call.deadline, f"the limit of {self._limits.request_timeout_s:g} s for one request")

    def _limit_answer(self, call: Call, cutoff: Cutoff) -> None:
        """Limit the time of an answer that has begun."""
        own_s = call.principal.bounds.answer_timeout_s
        limit_s = self._limits.answer_timeout_s if own_s is None else own_s
        if limit_s < math.inf:
            cutoff.limit(limit_s, f"the limit of {limit_s:g} s for one answer (answer_timeout_s)")

    @asynccontextmanager
    async def _placed(
        self, call: Call, request: GenerateRequest, trail: Trail, cutoff: Cutoff, turn: Turn
    ) -> AsyncIterator[Answer]:
        tries = await self.attempts.begin(call, trail, request)
        try:
            while True:
                async with AsyncExitStack() as held:
                    lease = await self.attempts.slot(tries, held)
                    turn.leave()
                    place = _place(lease)
                    failure: Failure
                    try:
                        async with self._passage(tries, place, lease, cutoff) as mailbox:
                            failed = await _failed(mailbox, tries)
                            if failed is None:
                                self.attempts.begun(tries, place.boot)
                                self._limit_answer(call, cutoff)
                                try:
                                    yield mailbox
                                finally:
                                    tries.attempt.over("cancelled", mailbox.end)
                                    self.attempts.ended(place.boot, mailbox.end)
                                return
                            failure = failed.failure
                    except CallFailed as refused:
                        failure = refused.failure
                self.attempts.failed(tries, place.boot, failure)
        finally:
            self.attempts.over(tries)

    def _passage(
        self, tries: Tries, place: Place, lease: Lease, cutoff: Cutoff
    ) -> AbstractAsyncContextManager[Mailbox]:
        """Return the exchange with the worker. The slot is given back when the worker's answer ends, read or not."""
        call = tries.call
        slow = ClientTooSlow("The client reads too slowly: its buffer of events is full, so the answer was cut off.")
        asked = self._in_slot(tries.request, call.model, place.worker)
        context = tries.attempt.context
        return self._relay.passage(
            place,
            asked,
            call.principal.team,
            call.request_id,
            lambda: cutoff.cut(slow),
            call.begin_by,
            context,
            on_end=lambda end: lease.give_back(_took(end)),
            weight=call.principal.weight,
            known_bytes=tries.ask.prefix.num_bytes,
        )


def _bounded(request: GenerateRequest, bounds: CallBounds, trail: Trail) -> GenerateRequest:
    """Return the request within the limits of its key.

    A priority beyond them is lowered and not refused: clients send one for every server alike, and an answer that
    begins a little later is worth more to them than none. A header tells.
    """
    most_urgent = -bounds.min_priority
    if request.priority > most_urgent:
        trail.priority = bounds.min_priority
        request = replace_struct(request, priority=most_urgent)
    if bounds.max_tokens is not None and (request.max_tokens is None or request.max_tokens > bounds.max_tokens):
        request = replace_struct(request, max_tokens=bounds.max_tokens)
    return request


async def _failed(mailbox: Mailbox, tries: Tries) -> Failed | None:
    """Return how an answer failed before its first token; None if it has begun. Callers that ask for it are shown the
    prompt's progress as it is read, so that their answers begin with that.
    """
    first = await mailbox.peek()
    if isinstance(first, Started):
        tries.trail.slot = first.slot
        if "progress" not in tries.request.tell:
            first = await mailbox.peek(past=Started)
    if not isinstance(first, Failed):
        return None
    mailbox.ended = True
    return first


def _in_trace(request: PoolRequest, tries: Tries) -> PoolRequest:
    context = tries.attempt.context
    if context is None:
        return request
    return replace_struct(request, traceparent=context.traceparent, tracestate=context.state)


def _took(end: Finished | Failed) -> float | None:
    """Return the tokens that a call's team is charged; None: as was predicted."""
    if not isinstance(end, Finished):
        return None
    usage = end.usage
    return usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens


def _place(lease: Lease) -> Place:
    return Place(lease.worker, lease.boot, lease.address.rstrip("/"), lease.model)
