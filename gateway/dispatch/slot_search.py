"""Finds slots for calls: on a call's model, or on a fallback of its chain where that has none in time.

Turns at something that few may have at once: the teams that wait take them one after the other.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, deque
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
from gateway.errors import InvalidRequest, NotSupported, PaddockError, PermissionDenied, QueueFull, QueueTimeout
from gateway.registry.snapshot import FleetView
from gateway.routing.placement import ANY, PlacementRequest, Ranking, placement_request_of, placement_request_of_pooled
from gateway.routing.retries import Outlook, Reason, choose_model
from gateway.telemetry.answer_log import QueuePosition
from workers.protocol.heartbeat import WorkerAddress
from workers.protocol.pooled import PoolRequest


class TeamTurns:
    """Lets a few in at a time, and of one team all but one of them at most: others need not wait for its slowest."""

    def __init__(self, at_once: int = 1, per_team: int | None = None) -> None:
        """`at_once`: turns in all. `per_team`: most turns of one team; None: one less than all, but at least one."""
        self._num_free = at_once
        self._per_team = max(1, at_once - 1) if per_team is None else per_team
        self._num_in: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiters by team; the team whose turn is next comes first."""

    @classmethod
    def of_each(cls, per_team: int) -> TeamTurns:
        """Return turns of which each team may have `per_team`, whatever the others have."""
        return cls(sys.maxsize, per_team)

    async def enter(self, team: str) -> Turn:
        """Wait for a turn, and return it; `leave` it in any case, once or more."""
        await self.take(team)
        return Turn(self, team)

    async def take(self, team: str) -> None:
        """Wait for a turn, which is to be given back in any case. A cancelled wait leaves nothing to give back."""
        if self._num_free and team not in self._waiting and self._num_in[team] < self._per_team:
            self._enter(team)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(team, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(team)
            raise

    def give_back(self, team: str) -> None:
        """Give a turn back, and let the first one of the next team in; the teams take turns."""
        self._num_free += 1
        self._num_in[team] -= 1
        if not self._num_in[team]:
            del self._num_in[team]
        while self._num_free:
            next_one = next((one for one in self._waiting if self._num_in[one] < self._per_team), None)
            if next_one is None:
                return
            turns = self._waiting.pop(next_one)
            turn = turns.popleft()
            if turns:
                self._waiting[next_one] = turns
            if not turn.done():
                self._enter(next_one)
                turn.set_result(None)

    def _enter(self, team: str) -> None:
        self._num_free -= 1
        self._num_in[team] += 1


class Turn:
    """A turn that was taken. Several parts of a call may give it back; the first one does."""

    __slots__ = ("_team", "_turns")

    def __init__(self, turns: TeamTurns, team: str) -> None:
        self._turns: TeamTurns | None = turns
        self._team = team

    def leave(self) -> None:
        """Give it back. Only the first time counts."""
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.give_back(self._team)


LOOK_AROUND_S = 0.25
"""Seconds between two looks of a call in line at whether its model still has workers, where it has fallbacks."""
INLINE_HELD_BYTES = 1 << 20
"""Bytes of a decoded body that are hashed on the event loop: 3,000 messages, or a hundred tools, take a ms or more."""
INLINE_TOKENS = 1 << 16
"""Token ids of pooled work that are counted on the event loop: a million of them took 48 ms."""

AskedT = TypeVar("AskedT", CallState, PoolRequest)


class Lease(Protocol):
    """A slot on a worker."""

    @property
    def at(self) -> WorkerAddress: ...
    @property
    def ranking(self) -> Ranking: ...
    @property
    def overtaken(self) -> int:
        """How often a slot went to a call that was behind this one in the queue."""
        ...

    def give_back(self, took: float | None) -> None:
        """Give the slot back: the worker is done with the call. `took`: its tokens; None: as predicted. Never waits."""
        ...


class Admission(Protocol):
    def slot(
        self,
        call: Call,
        avoid: frozenset[str],
        placement_request: PlacementRequest,
        priority: int,
        queue_position: QueuePosition,
        avoid_now: Callable[[], frozenset[str]],
    ) -> AbstractAsyncContextManager[Lease]: ...

    def predicted_wait_s(self, model: str) -> float:
        """Return the seconds that a call which came now would wait for a slot of the model."""
        ...


class SlotSearch:
    """Prepares calls for the models of their chains, and waits for slots there."""

    def __init__(
        self, fleet: FleetView, admission: Admission, workers: SuitableWorkers, adapters: CallAdapters
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._workers = workers
        self._adapters = adapters
        self._hashing = TeamTurns()
        """The teams' turns at hashing the prefixes of long prompts."""

    async def prepare(self, state: CallState) -> None:
        """Set the request as its model gets it, and its placement request. A long prompt's prefixes are hashed on a
        thread, teams taking turns. Raises InvalidRequest, PermissionDenied for adapters.
        """
        if isinstance(state.asked, PoolRequest):
            num_tokens = sum([len(one) for one in state.asked.inputs if not isinstance(one, str)])
            if num_tokens <= INLINE_TOKENS:
                state.placement_request = placement_request_of_pooled(state.asked)
            else:
                state.placement_request = await self._on_thread(state.call, placement_request_of_pooled, state.asked)
            return
        state.request = self._adapters.apply(state.call, state.asked)
        await self._renew_placement_request(state)

    async def _renew_placement_request(self, state: CallState) -> None:
        """Set the placement request of the call's current request."""
        if state.call.held_bytes <= INLINE_HELD_BYTES and chars_of(state.request) <= INLINE_CHARS:
            state.placement_request = self._placement_request_of(state)
        else:
            state.placement_request = await self._on_thread(state.call, self._placement_request_of, state)
        state.placement_request_is_stale = False

    async def _on_thread(
        self, call: Call, make: Callable[[AskedT], PlacementRequest], asked: AskedT
    ) -> PlacementRequest:
        """Return what `make` makes of `asked`, on a thread; the teams take turns."""
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

    async def slot(self, state: CallState, held: AsyncExitStack) -> Lease:
        """Wait for a slot of the first model of the call's chain that has one in time; `held` gives the slot back.

        Raises PaddockError where none has.
        """
        while True:
            self._choose_model(state)
            if state.placement_request_is_stale:
                await self._renew_placement_request(state)
            wait = state.answer_log.begin_wait(state.call.model)
            try:
                lease = await self._slot_of_model(state, held)
            except (QueueFull, QueueTimeout) as error:
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
                self._workers.circuits.end_trials(state, but=lease.at.boot)
                state.begin_attempt(lease.at, lease.ranking, self._workers.fingerprint(lease.at))
                return lease

    async def _slot_of_model(self, state: CallState, held: AsyncExitStack) -> Lease | None:
        """Return a slot of the call's model; None as `_wait`. Raises QueueFull, QueueTimeout, NotSupported."""
        avoid = await self._workers.avoided(state)
        priority, queue_position = state.request.priority, state.answer_log.queue_position
        avoid_now = partial(self._workers.avoided_in_line, state)
        slot = self._admission.slot(state.call, avoid, state.placement_request, priority, queue_position, avoid_now)
        is_unknown = not self._fleet.snapshot.workers.get(state.call.model)
        lease = await self._wait(state, held, slot)
        if is_unknown and lease is not None:
            await self._workers.check(state, lease.at)
        return lease

    async def _wait(
        self, state: CallState, held: AsyncExitStack, slot: AbstractAsyncContextManager[Lease]
    ) -> Lease | None:
        """Wait for the slot; None: meanwhile the model lost its last suitable worker, and a fallback has one."""
        if not state.call.fallbacks:
            return await held.enter_async_context(slot)
        try:
            async with asyncio.timeout(None) as patience:
                with _watch(partial(self._is_forsaken, state), lambda: patience.reschedule(0.0)):
                    return await held.enter_async_context(slot)
        except TimeoutError:
            if not patience.expired():
                raise
            return None

    def _choose_model(self, state: CallState) -> None:
        """Move the call to the best model of its chain, if that is another one. If none is ready, the call stays."""
        call = state.call
        if not call.fallbacks:
            return
        here = self._outlook(state, call.model)
        best = choose_model(self._outlooks(state, here), state.patience_s)
        if best is not None and best.model != call.model:
            self._move(state, best.model, Reason.WAIT if here.ready else Reason.NO_WORKER)
            if not here.ready:
                state.wait_anew()  # the call may have waited for a first worker

    def fall_back(self, state: CallState, reason: Reason, error: PaddockError) -> None:
        """Move the call to a fallback model. Raises `error`, or that of the first model, if none is ready."""
        state.first_error = state.first_error or error
        if reason is Reason.QUEUE_TIMEOUT:
            state.wait_anew()
        best = choose_model(self._outlooks(state), state.patience_s)
        if best is None:
            raise state.first_error
        self._move(state, best.model, reason)

    def _move(self, state: CallState, model: str, reason: Reason) -> None:
        state.move_to(model, reason)
        if isinstance(state.asked, PoolRequest):
            return
        had_adapters = bool(state.request.adapters)
        state.request = self._adapters.apply(state.call, replace_struct(state.asked, slot=ANY))
        if had_adapters or state.request.adapters:
            state.placement_request_is_stale = True  # prefixes are hashed anew, before the call waits for a slot there
        else:
            state.placement_request = replace(state.placement_request, slot=ANY)

    def _is_forsaken(self, state: CallState) -> bool:
        """Return whether the call's model has no worker that would do, and one of its fallbacks has."""
        return not self._outlook(state, state.call.model).ready and any(one.ready for one in self._outlooks(state))

    def _outlooks(self, state: CallState, *before: Outlook) -> Iterator[Outlook]:
        yield from before
        for model in state.call.fallbacks:
            yield self._outlook(state, model)

    def _outlook(self, state: CallState, model: str) -> Outlook:
        ready = self._workers.any_for(state, model) and self._has_adapters(state, model)
        return Outlook(model, ready, self._admission.predicted_wait_s(model) if ready else 0.0)

    def _has_adapters(self, state: CallState, model: str) -> bool:
        if isinstance(state.asked, PoolRequest) or not state.asked.adapters or model == state.call.model:
            return True
        try:
            self._adapters.apply(replace(state.call, model=model), state.asked)
        except (InvalidRequest, PermissionDenied):
            return False
        return True


@contextmanager
def _watch(found: Callable[[], bool], then: Callable[[], None]) -> Iterator[None]:
    """Call `then` once `found` returns True, which is asked every LOOK_AROUND_S seconds while the block lasts."""
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []

    def look() -> None:
        if found():
            then()
        else:
            timers[:] = [loop.call_later(LOOK_AROUND_S, look)]

    timers.append(loop.call_later(LOOK_AROUND_S, look))
    try:
        yield
    finally:
        timers[0].cancel()
