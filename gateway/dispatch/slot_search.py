"""Finds slots for calls: on a call's own model or, if that has no slot in time, on one of its fallback models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from msgspec.structs import replace as replace_struct

from gateway.adapters.choice import CallAdapters
from gateway.call import Call
from gateway.dispatch.call_state import CallState
from gateway.dispatch.request_size import INLINE_CHARS, chars_of
from gateway.dispatch.suitable_workers import SuitableWorkers
from gateway.dispatch.team_turns import TeamTurns
from gateway.errors import (
    InvalidRequest,
    ModelNotLoaded,
    NotSupported,
    PaddockError,
    PermissionDenied,
    QueueFull,
    QueueTimeout,
)
from gateway.registry.snapshot import FleetView
from gateway.routing.placement import ANY, PlacementRequest, Ranking, placement_request_of, placement_request_of_pooled
from gateway.routing.retries import Outlook, Reason, choose_model
from gateway.telemetry.answer_log import QueuePosition
from workers.protocol.heartbeat import WorkerAddress
from workers.protocol.pooled import PoolPrompt, PoolRequest

CHECK_INTERVAL_S = 0.25
"""Seconds between two checks whether the model of a queued call still has workers, for calls with fallbacks."""
INLINE_HELD_BYTES = 1 << 20
"""A decoded body of at most this many bytes is hashed on the event loop: 3,000 messages or 100 tools take over 1 ms."""
INLINE_TOKENS = 1 << 16
"""The size of pooled work is computed on the event loop if it has at most this many token ids; a million took 48 ms."""

AskedT = TypeVar("AskedT", CallState, PoolRequest)


class SlotLease(Protocol):
    """The lease of a slot on a worker, as dispatch sees it."""

    @property
    def at(self) -> WorkerAddress: ...
    @property
    def ranking(self) -> Ranking: ...
    @property
    def overtaken(self) -> int:
        """How often a slot went to a call that was behind this one in the queue."""
        ...

    @property
    def predicted(self) -> float:
        """Tokens that the call's team is charged unless `give_back` says otherwise."""
        ...

    def give_back(self, took: float | None) -> None:
        """Give the slot back after the call. `took`: tokens to charge for; None: as predicted. Never waits."""
        ...


class Admission(Protocol):
    """The part of admission that dispatch uses."""

    def slot(
        self,
        call: Call,
        avoid: frozenset[str],
        placement_request: PlacementRequest,
        priority: int,
        queue_position: QueuePosition,
        avoid_now: Callable[[], frozenset[str]],
    ) -> AbstractAsyncContextManager[SlotLease]: ...

    def predicted_wait_s(self, model: str) -> float:
        """Return the predicted seconds that a call would wait for a slot of the model if it came now."""
        ...

    def may_load(self, model: str) -> bool:
        """Return whether a call that waits for a model without a worker may have it loaded."""
        ...

    def want(self, model: str) -> None:
        """Have a model loaded for calls to come: this one goes to a fallback. Never waits."""
        ...


class SlotSearch:
    """Finds a slot for a call, on its model or else on a fallback model, and adapts the request to that model."""

    def __init__(
        self, fleet: FleetView, admission: Admission, workers: SuitableWorkers, adapters: CallAdapters
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._workers = workers
        self._adapters = adapters
        self._hashing = TeamTurns()
        """Lets the teams take turns at hashing the prefixes of long prompts."""

    async def prepare(self, state: CallState) -> None:
        """Set `state.request` to the request in the form for the call's model, and set `state.placement_request`.

        The prefixes of a long prompt are hashed on a thread, with teams taking turns. Raises InvalidRequest or
        PermissionDenied because of the call's adapters."""
        if isinstance(state.asked, PoolRequest):
            num_tokens = sum([len(one) for one in state.asked.inputs if not isinstance(one, str | PoolPrompt)])
            if num_tokens <= INLINE_TOKENS:
                state.placement_request = placement_request_of_pooled(state.asked)
            else:
                state.placement_request = await self._on_thread(state.call, placement_request_of_pooled, state.asked)
            return
        state.request = self._adapters.apply(state.call, state.asked)
        await self._renew_placement_request(state)

    async def _renew_placement_request(self, state: CallState) -> None:
        """Set `state.placement_request` from the call's current request."""
        if state.call.held_bytes <= INLINE_HELD_BYTES and chars_of(state.request) <= INLINE_CHARS:
            state.placement_request = self._placement_request_of(state)
        else:
            state.placement_request = await self._on_thread(state.call, self._placement_request_of, state)
        state.placement_request_is_stale = False

    async def _on_thread(
        self, call: Call, make: Callable[[AskedT], PlacementRequest], asked: AskedT
    ) -> PlacementRequest:
        """Return `make(asked)`, computed on a thread; the teams take turns."""
        team = call.principal.team
        await self._hashing.take(team)
        try:
            return await asyncio.to_thread(make, asked)
        finally:
            self._hashing.give_back(team)

    def _placement_request_of(self, state: CallState) -> PlacementRequest:
        """Return the placement request of the call."""
        hashes = self._fleet.snapshot.contents.get(state.call.model, {})
        return placement_request_of(state.request, state.call.principal.team, hashes)

    async def wait_for_slot(self, state: CallState, held: AsyncExitStack) -> SlotLease:
        """Wait for a slot on the call's model or, if none comes in time, on a fallback. `held` gives the slot back.

        Raises PaddockError if neither the model nor any fallback has a slot in time, or limits refuse the call."""
        while True:
            self._choose_model(state)
            self._want_first(state.call)
            if state.placement_request_is_stale:
                await self._renew_placement_request(state)
            wait = state.answer_log.begin_wait(state.call.model)
            try:
                lease = await self._slot_of_model(state, held)
            except (QueueFull, QueueTimeout, ModelNotLoaded) as error:
                wait.end(str(error.code))
                self.fall_back(state, Reason(str(error.code)), error)
            except NotSupported as error:
                wait.end(Reason.UNSUITED.value)
                await held.aclose()
                self.fall_back(state, Reason.UNSUITED, error)
            else:
                if lease is None:
                    wait.end(Reason.NO_WORKER.value)
                    continue
                wait.end(overtaken=lease.overtaken)
                await _permitted(state, lease)
                self._workers.circuits.end_trials(state, but=lease.at.boot)
                state.begin_attempt(lease.at, lease.ranking, self._workers.fingerprint(lease.at))
                return lease

    async def _slot_of_model(self, state: CallState, held: AsyncExitStack) -> SlotLease | None:
        """Return a slot on the call's model; None: try a fallback. Raises QueueFull, QueueTimeout, ModelNotLoaded,
        NotSupported."""
        avoid = await self._workers.avoided(state)
        priority, queue_position = state.request.priority, state.answer_log.queue_position
        avoid_now = partial(self._workers.avoided_now, state)
        slot = self._admission.slot(state.call, avoid, state.placement_request, priority, queue_position, avoid_now)
        is_unknown = not self._fleet.snapshot.workers.get(state.call.model)
        lease = await self._wait(state, held, slot)
        if is_unknown and lease is not None:
            await self._workers.check(state, lease.at)
        return lease

    async def _wait(
        self, state: CallState, held: AsyncExitStack, slot: AbstractAsyncContextManager[SlotLease]
    ) -> SlotLease | None:
        """Wait for the slot. Return None if the model loses its last suitable worker while a fallback model has one."""
        if not state.call.fallbacks:
            return await held.enter_async_context(slot)
        try:
            async with asyncio.timeout(None) as patience:
                with _call_when(partial(self._should_fall_back, state), lambda: patience.reschedule(0.0)):
                    return await held.enter_async_context(slot)
        except TimeoutError:
            if not patience.expired():
                raise
            return None

    def _choose_model(self, state: CallState) -> None:
        """Move the call to a fallback if `choose_model` prefers one. If no model has suitable workers, it stays."""
        call = state.call
        if not call.fallbacks:
            return
        here = self._outlook(state, call.model)
        best = choose_model(self._outlooks(state, here), state.patience_s)
        if best is not None and best.model != call.model:
            self._move(state, best.model, Reason.WAIT if here.ready else Reason.NO_WORKER)
            if not here.ready:
                state.wait_anew()  # it may have waited long for a first worker

    def _want_first(self, call: Call) -> None:
        """Have the model loaded that a fallback stands in for: the calls that come next are to have it."""
        first = call.meant_for
        if first and not self._fleet.snapshot.workers.get(first) and self._admission.may_load(first):
            self._admission.want(first)

    def fall_back(self, state: CallState, reason: Reason, error: PaddockError) -> None:
        """Move the call to a fallback. If none has a suitable worker, and none can be loaded in place of a model that
        can't, raise the call's first error, or else `error`."""
        state.first_error = state.first_error or error
        if reason in (Reason.QUEUE_TIMEOUT, Reason.NOT_LOADED):
            state.wait_anew()
        best = choose_model(self._outlooks(state), state.patience_s)
        model = best.model if best is not None else ""
        if best is None and reason is Reason.NOT_LOADED:
            model = next((model for model in state.call.fallbacks if self._admission.may_load(model)), "")
        if not model:
            raise state.first_error
        self._move(state, model, reason)

    def _move(self, state: CallState, model: str, reason: Reason) -> None:
        state.move_to(model, reason)
        if isinstance(state.asked, PoolRequest):
            return
        had_adapters = bool(state.request.adapters)
        state.request = self._adapters.apply(state.call, replace_struct(state.asked, slot=ANY))
        if had_adapters or state.request.adapters:
            state.placement_request_is_stale = True  # computed anew before the call waits for a slot
        else:
            state.placement_request = replace(state.placement_request, slot=ANY)

    def _should_fall_back(self, state: CallState) -> bool:
        """Return whether the call's model has no suitable worker but one of its fallbacks has."""
        return not self._outlook(state, state.call.model).ready and any(one.ready for one in self._outlooks(state))

    def _outlooks(self, state: CallState, *before: Outlook) -> Iterator[Outlook]:
        yield from before
        for model in state.call.fallbacks:
            yield self._outlook(state, model)

    def _outlook(self, state: CallState, model: str) -> Outlook:
        ready = self._workers.has_any(state, model) and self._has_adapters(state, model)
        return Outlook(model, ready, self._admission.predicted_wait_s(model) if ready else 0.0)

    def _has_adapters(self, state: CallState, model: str) -> bool:
        if isinstance(state.asked, PoolRequest) or not state.asked.adapters or model == state.call.model:
            return True
        try:
            self._adapters.apply(replace(state.call, model=model), state.asked)
        except (InvalidRequest, PermissionDenied):
            return False
        return True


async def _permitted(state: CallState, lease: SlotLease) -> None:
    """Wait until the call is known to be within its limits. Raises RateLimited, StoreUnavailable."""
    is_permitted = False
    try:
        await state.call.permit.granted()
        is_permitted = True
    finally:
        if not is_permitted:
            lease.give_back(0.0)  # nothing was computed


@contextmanager
def _call_when(found: Callable[[], bool], then: Callable[[], None]) -> Iterator[None]:
    """During the block, call `found` every CHECK_INTERVAL_S seconds; when it returns True, call `then` and stop."""
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []

    def look() -> None:
        if found():
            then()
        else:
            timers[:] = [loop.call_later(CHECK_INTERVAL_S, look)]

    timers.append(loop.call_later(CHECK_INTERVAL_S, look))
    try:
        yield
    finally:
        timers[0].cancel()
