"""The dispatcher of calls until their answers begin: it chooses the model of the chain, waits for slots and retries.

await attempts.begin(call, trail, request)        once per call
await attempts.slot(tries, held)                  a slot, of a fallback where the model has none in time
attempts.begun(tries, boot), .ended(boot, end)    the answer has begun, is over
attempts.failed(tries, boot, failure)             it has not begun: raises, unless it may be retried in another slot
attempts.over(tries)                              once per call
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import replace
from functools import partial

from msgspec.structs import replace as replace_struct

from gateway.call import Call
from gateway.catalog.kinds import check_kind
from gateway.errors import (
    InvalidRequest,
    NotSupported,
    PaddockError,
    PermissionDenied,
    QueueFull,
    QueueTimeout,
    Unsuited,
)
from gateway.relay.failures import answer_to
from gateway.relay.payload import INLINE_CHARS, chars_of
from gateway.routing.ask import Ask, ask_of, ask_of_pooled
from gateway.routing.chain import Outlook, Reason, chosen
from gateway.routing.circuit import Circuits
from gateway.routing.placed import bid_for, summary
from gateway.routing.retry_budget import RetryBudget
from gateway.routing.slot_numbers import ANY
from gateway.team_turns import TeamTurns
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.trail import Trail
from gateway.tries import Admission, Connections, Fleet, Lease, Tries, on_model
from workers.protocol.events import Failed, Finished
from workers.protocol.failures import RETRYABLE, Failure, FailureCode
from workers.protocol.heartbeat import Heartbeat
from workers.protocol.pooled import PoolRequest
from workers.protocol.requests import GenerateRequest

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
MAX_LOST = 2
"""Workers that may be lost under one call before it is given up: the call may be what ends them."""
LOOK_AGAIN_S = 0.05
LOOK_AROUND_S = 0.25
"""Seconds between two looks of a call in line at whether its model still has workers, where it has fallbacks."""
TIMER_S = 0.05
"""Seconds by which a timer may be early."""
ADAPTERS_S = 10.0
"""Seconds that a call waits for an adapter that is registered but on no worker; then a worker says what is wrong."""
BLAMED = frozenset({FailureCode.INTERNAL, FailureCode.WORKER_LOST, FailureCode.OUT_OF_MEMORY, FailureCode.UNAVAILABLE})
"""Failures that are the worker's own: enough of them in a row open its circuit, and all calls avoid it."""
INLINE_HELD_BYTES = 1 << 20
"""Bytes of a decoded body that are hashed on the event loop: 3,000 messages, or a hundred tools, take a ms or more."""
UNPAID = frozenset({FailureCode.DRAINING, FailureCode.OUT_OF_MEMORY})
"""Failures whose retry is not charged to the retry budget: a worker that drains or has no memory refuses each call
once and at once, so a retry makes no trouble worse."""
UNSUITED = frozenset({FailureCode.CONTEXT_OVERFLOW, FailureCode.UNSUPPORTED})
"""Failures of a request at one model that another model may accept."""


class Attempts:
    """The dispatcher of one gateway."""

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        connections: Connections,
        metrics: Metrics,
        adapted: Callable[[Call, GenerateRequest], GenerateRequest],
        retry_share: float,
        *,
        queue_s: float,
        start_s: float,
    ) -> None:
        """`adapted` gives a request the adapters that it is computed with; it may raise InvalidRequest or
        PermissionDenied. `queue_s`, `start_s`: how long a call waits for a slot, and for the first worker of its model.
        """
        self._fleet = fleet
        self._admission = admission
        self._connections = connections
        self._metrics = metrics
        self._adapted = adapted
        self._queue_s = queue_s
        self._start_s = start_s
        self._budget = RetryBudget(retry_share)
        self.circuits = Circuits()
        """The circuits of the workers; their times are of time.monotonic()."""
        self._hashing = TeamTurns()
        """The teams' turns at hashing the prefixes of long prompts."""
        self._aside: dict[Tries, float] = {}
        """Calls that wait for a suitable worker before they get into line -> time.monotonic() when they began to."""

    async def begin(self, call: Call, trail: Trail, asked: GenerateRequest) -> Tries:
        """Return the state of a call; tell `over` of its end. Raises InvalidRequest, PermissionDenied for adapters."""
        tries = Tries(call, trail, asked, request=self._adapted(call, asked))
        if trail.held_bytes <= INLINE_HELD_BYTES and chars_of(tries.request) <= INLINE_CHARS:
            tries.ask = self._ask_of(tries)
        else:
            tries.ask = await self._ask_of_long(tries)
        self._budget.called(call.model, time.monotonic())
        self._metrics.in_flight.inc(call.model)
        return tries

    def begin_pooled(self, call: Call, trail: Trail, asked: PoolRequest) -> Tries:
        self._budget.called(call.model, time.monotonic())
        self._metrics.in_flight.inc(call.model)
        return Tries(call, trail, None, ask=ask_of_pooled(asked))

    async def slot(self, tries: Tries, held: AsyncExitStack) -> Lease:
        """Wait for a slot of the first model of the call's chain that has one in time; `held` gives the slot back.

        Raises PaddockError where none has.
        """
        while True:
            self._settle(tries)
            wait = tries.trail.record.waits(tries.call.model, tries.trail.standing)
            try:
                lease = await self._one_slot(tries, held)
            except (QueueFull, QueueTimeout) as error:
                wait.over(str(error.code))
                self._fall_back(tries, Reason(str(error.code)), error)
                continue
            except NotSupported as error:
                wait.over(Reason.UNSUITED.value)
                await held.aclose()
                self._fall_back(tries, Reason.UNSUITED, error)
                continue
            if lease is None:
                wait.over(Reason.NO_WORKER.value)
                continue
            wait.over(overtaken=lease.overtaken)
            self.circuits.leaves(tries, but=lease.boot)
            tries.with_boot = lease.boot
            _note_attempt(tries, lease, self._fingerprint(tries.call.model, lease.worker))
            return lease

    def _fingerprint(self, model: str, worker: str) -> str:
        beats = self._fleet.snapshot.workers.get(model, ())
        return next((beat.fingerprint for beat in beats if beat.worker == worker), "")

    async def _one_slot(self, tries: Tries, held: AsyncExitStack) -> Lease | None:
        """Return a slot of the call's model; None as `_waited` does. Raises QueueFull, QueueTimeout, NotSupported."""
        with _waiting(tries.trail):
            avoid = await self._set_aside(tries)
        priority, standing = tries.request.priority, tries.trail.standing
        bad_now = partial(self._bad_now, tries)
        slot = self._admission.slot(tries.call, avoid, tries.ask, priority, standing, bad_now)
        blind = not self._fleet.snapshot.workers.get(tries.call.model)
        with _waiting(tries.trail):
            lease = await self._waited(tries, held, slot)
            if blind and lease is not None:
                await self._look_closer(tries, lease)
        return lease

    def begun(self, tries: Tries, boot: str) -> None:
        tries.with_boot = ""
        tries.attempt.begun()
        self._metrics.attempts.inc(tries.call.model, "started")
        self.circuits.begun(boot, time.monotonic())

    def complete(self, boot: str) -> None:
        self.circuits.complete(boot, time.monotonic())

    def ended(self, boot: str, end: Finished | Failed | None) -> None:
        """Note how a begun answer ended. `end`: its last event; None where its caller did not wait for it."""
        if isinstance(end, Finished):
            self.complete(boot)
        elif isinstance(end, Failed) and end.failure.code in BLAMED:
            self._blame(boot)

    def failed(self, tries: Tries, boot: str, failure: Failure) -> None:
        """Prepare a retry. Raises PaddockError where another worker would not help, or enough have been tried."""
        tries.with_boot = ""
        model, code = tries.call.model, failure.code
        tries.attempt.over(code.value)
        if tries.trail.submitted_at is not None:
            tries.trail.failed_ms += (time.monotonic() - tries.trail.submitted_at) * 1e3
        self._metrics.attempts.inc(model, code.value)
        if code is FailureCode.WORKER_LOST:
            tries.lost.add(boot)
        if code in BLAMED:
            self._blame(boot)
        if code is FailureCode.CONTEXT_OVERFLOW and self._fits_elsewhere(tries, failure):
            self._wait_anew(tries)
            return
        if tries.call.meant_for and code in UNSUITED:
            self._fall_back(tries, Reason.UNSUITED, _unsuited(tries.call, failure))
            return
        if code not in RETRYABLE or tries.trail.attempts >= MAX_ATTEMPTS or len(tries.lost) >= MAX_LOST:
            raise answer_to(failure)
        if code not in UNPAID:
            granted = self._budget.take(model, time.monotonic())
            self._metrics.retries.inc(model, "granted" if granted else "denied")
            if not granted:
                raise answer_to(failure)
        tries.rest(boot, failure, time.monotonic())
        self._wait_anew(tries)  # losing a worker is not the caller's fault

    def _fits_elsewhere(self, tries: Tries, failure: Failure) -> bool:
        """Return whether another worker of the model has the context for a prompt that was too long for the one that
        counted it: one that found less memory at its start has less. The call avoids those that are too small.
        """
        if not failure.num_prompt_tokens or tries.trail.attempts >= MAX_ATTEMPTS:
            return False
        beats = self.reachable(tries.call.model)
        small = {beat.boot for beat in beats if beat.n_ctx <= failure.num_prompt_tokens}
        if all(beat.boot in small or beat.draining for beat in beats):
            return False
        tries.resting |= dict.fromkeys(small, float("inf"))
        return True

    def over(self, tries: Tries) -> None:
        """Note that the call is over, however it ended."""
        self._metrics.in_flight.inc(tries.call.model, by=-1.0)
        self.circuits.leaves(tries)
        if tries.with_boot and time.monotonic() >= tries.call.deadline - TIMER_S:
            self._blame(tries.with_boot)  # the worker had all of the call's time, and has not begun

    def reachable(self, model: str) -> list[Heartbeat]:
        """Return the model's workers that are connected, by id: the order in which slots are numbered over them."""
        beats = self._fleet.snapshot.workers.get(model, ())
        return [beat for beat in beats if not self._connections.is_lost(beat.boot)]

    def left_alone(self) -> dict[str, int]:
        """Return how many workers of each model calls avoid now."""
        states = self.circuits.states(time.monotonic())
        return {
            model: sum(beat.boot in states and states[beat.boot].state != "closed" for beat in beats)
            for model, beats in self._fleet.snapshot.workers.items()
        }

    def set_aside(self) -> dict[str, tuple[int, float]]:
        """Return for each model how many calls wait for a suitable worker, and the first one's wait in seconds."""
        now = time.monotonic()
        found: dict[str, tuple[int, float]] = {}
        for tries, since in self._aside.items():
            number, longest_s = found.get(tries.call.model, (0, 0.0))
            found[tries.call.model] = (number + 1, max(longest_s, now - since))
        return found

    def _blame(self, boot: str) -> None:
        pause_s = self.circuits.failed(boot, time.monotonic())
        if not pause_s:
            return
        beats = (beat for beats in self._fleet.snapshot.workers.values() for beat in beats)
        failing = next((beat for beat in beats if beat.boot == boot), None)
        if failing is not None:
            self._metrics.circuits_opened.inc(failing.model)
            fields = {"worker": failing.worker, "model": failing.model, "pause_s": round(pause_s, 2)}
            log.warning("worker fails call after call and is left alone", extra={"fields": fields})

    async def _waited(
        self, tries: Tries, held: AsyncExitStack, slot: AbstractAsyncContextManager[Lease]
    ) -> Lease | None:
        """Wait for the slot; None: meanwhile the model lost its last suitable worker, and a fallback has one."""
        if not tries.call.fallbacks:
            return await held.enter_async_context(slot)
        try:
            async with asyncio.timeout(None) as patience:
                with _watch(lambda: self._forsaken(tries), lambda: patience.reschedule(0.0)):
                    return await held.enter_async_context(slot)
        except TimeoutError:
            if not patience.expired():
                raise
            return None

    def _forsaken(self, tries: Tries) -> bool:
        ready = (outlook.ready for outlook in self._outlooks(tries))
        return not self._outlook(tries, tries.call.model).ready and any(ready)

    def _settle(self, tries: Tries) -> None:
        """Move the call to the best model of its chain, if that is another one. If none is ready, the call stays."""
        call = tries.call
        if not call.fallbacks:
            return
        here = self._outlook(tries, call.model)
        best = chosen(self._outlooks(tries, here), _patience_s(call))
        if best is not None and best.model != call.model:
            self._go_on(tries, best.model, Reason.WAIT if here.ready else Reason.NO_WORKER)
            if not here.ready:
                self._wait_anew(tries)  # the call may have waited for a first worker

    def _fall_back(self, tries: Tries, reason: Reason, error: PaddockError) -> None:
        """Move the call to a fallback model. Raises `error`, or that of the first model, if none is ready."""
        tries.told = tries.told or error
        if reason is Reason.QUEUE_TIMEOUT:
            self._wait_anew(tries)
        best = chosen(self._outlooks(tries), _patience_s(tries.call))
        if best is None:
            raise tries.told
        self._go_on(tries, best.model, reason)

    def _wait_anew(self, tries: Tries) -> None:
        tries.call = tries.call.waiting(time.monotonic(), queue_s=self._queue_s, start_s=self._start_s)

    def _go_on(self, tries: Tries, model: str, reason: Reason) -> None:
        self._metrics.fallbacks.inc(tries.call.model, model, reason.value)
        tries.trail.record.notes("fallback", model=tries.call.model, fallback=model, reason=reason.value)
        self._metrics.in_flight.inc(tries.call.model, by=-1.0)
        self._metrics.in_flight.inc(model)  # the fallback's workers are needed now
        tries.call = on_model(tries.call, model)
        tries.trail.model = model
        self._budget.called(model, time.monotonic())
        if tries.asked is not None:
            self._adapt(tries, replace_struct(tries.asked, slot=ANY))

    def _adapt(self, tries: Tries, asked: GenerateRequest) -> None:
        """Set the next model's request and its placement; prefixes are hashed anew only if either uses adapters."""
        had_adapters = bool(tries.request.adapters)
        tries.request = self._adapted(tries.call, asked)
        if had_adapters or tries.request.adapters:
            tries.ask = self._ask_of(tries)
        else:
            tries.ask = replace(tries.ask, slot=asked.slot)

    def _ask_of(self, tries: Tries) -> Ask:
        """Return the placement request of the call."""
        hashes = self._fleet.snapshot.contents.get(tries.call.model, {})
        return ask_of(tries.request, tries.call.principal.team, hashes)

    async def _ask_of_long(self, tries: Tries) -> Ask:
        """Return the placement request of a long prompt. Its prefixes are hashed on a thread, teams taking turns."""
        team = tries.call.principal.team
        await self._hashing.take(team)
        try:
            return await asyncio.to_thread(self._ask_of, tries)
        finally:
            self._hashing.give_back(team)

    def _outlooks(self, tries: Tries, *before: Outlook) -> Iterator[Outlook]:
        yield from before
        for model in tries.call.fallbacks:
            yield self._outlook(tries, model)

    def _outlook(self, tries: Tries, model: str) -> Outlook:
        now = time.monotonic()
        beats = [beat for beat in self._fleet.snapshot.workers.get(model, ()) if not beat.draining]
        ready = len(self._bad(tries, beats, now, going=False)) < len(beats) and self._has_adapters(tries, model)
        return Outlook(model, ready, self._admission.predicted_wait_s(model) if ready else 0.0)

    def _has_adapters(self, tries: Tries, model: str) -> bool:
        if tries.asked is None or not tries.asked.adapters or model == tries.call.model:
            return True
        try:
            self._adapted(replace(tries.call, model=model), tries.asked)
        except (InvalidRequest, PermissionDenied):
            return False
        return True

    def _bad(self, tries: Tries, beats: Iterable[Heartbeat], now: float, *, going: bool = True) -> frozenset[str]:
        """Return the workers to avoid. A call that is `going` takes one with an open circuit if there is no other."""
        if not tries.resting and not self._connections.any_lost and self.circuits.all_new:
            return frozenset()  # as nearly always, and there may be a thousand workers
        beats = tuple(beats)
        out = {
            beat.worker
            for beat in beats
            if tries.resting.get(beat.boot, 0.0) > now or self._connections.is_lost(beat.boot)
        }
        alone = {beat.worker for beat in beats if not self.circuits.admits(beat.boot, tries, now, going=going)}
        return frozenset(out if going and len(out | alone) == len(beats) else out | alone)

    def _bad_now(self, tries: Tries) -> frozenset[str]:
        """Return the workers that a waiting call avoids now: workers recover, and are replaced."""
        beats = self._fleet.snapshot.workers.get(tries.call.model, ())
        return self._bad(tries, beats, time.monotonic(), going=False)

    async def _set_aside(self, tries: Tries) -> frozenset[str]:
        """Return what `_avoided` does, and count the call as set aside while that waits."""
        self._aside[tries] = time.monotonic()
        try:
            return await self._avoided(tries)
        finally:
            del self._aside[tries]

    async def _avoided(self, tries: Tries) -> frozenset[str]:
        """Return the workers to avoid; while that is all of them, wait for one to recover or to be replaced."""
        call = tries.call
        if tries.ask.adapters:
            await self._arrived(tries, tries.ask.adapters)
        while True:
            now = time.monotonic()
            beats = self._fleet.snapshot.workers.get(call.model, ())
            bad = self._bad(tries, beats, now)
            if len(bad) < len(beats):
                return bad
            if not beats or now >= call.queue_deadline:
                return frozenset()
            tries.trail.standing.waits_aside()
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _arrived(self, tries: Tries, adapters: frozenset[str]) -> None:
        """Return when a worker has these adapters, or after ADAPTERS_S: new workers get registered ones in a moment."""
        call = tries.call
        until = min(call.queue_deadline, time.monotonic() + ADAPTERS_S)
        while time.monotonic() < until:
            beats = [beat for beat in self._fleet.snapshot.workers.get(call.model, ()) if not beat.draining]
            if not beats or any(adapters.issubset(beat.adapters) for beat in beats):
                return  # without workers the call waits in line
            tries.trail.standing.waits_aside()
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _look_closer(self, tries: Tries, lease: Lease) -> None:
        """Check what could not be known of a model without workers. Raises NotSupported if it does other work. Returns
        when the worker has the adapters, or after ADAPTERS_S: then it says itself what is wrong.
        """
        until = time.monotonic() + ADAPTERS_S
        while beat := self._beat_of(tries.call.model, lease.boot):
            if tries.call.kind is not None:
                check_kind(tries.call.alias, tries.call.kind, (beat,))
            if tries.ask.adapters.issubset(beat.adapters) or time.monotonic() >= until:
                return
            tries.trail.standing.waits_aside()
            await asyncio.sleep(LOOK_AGAIN_S)

    def _beat_of(self, model: str, boot: str) -> Heartbeat | None:
        return next((beat for beat in self._fleet.snapshot.workers.get(model, ()) if beat.boot == boot), None)


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


@contextmanager
def _waiting(trail: Trail) -> Iterator[None]:
    """Add the time of the block to the call's `queue_ms`, however it ends."""
    began = time.monotonic()
    try:
        yield
    finally:
        trail.queue_ms += (time.monotonic() - began) * 1e3


def _patience_s(call: Call) -> float:
    """Return how many seconds the caller still waits for a slot."""
    left_s = call.queue_deadline - time.monotonic()
    return min(left_s, call.begin_by - time.time()) if call.begin_by else left_s


def _unsuited(call: Call, failure: Failure) -> Unsuited:
    return Unsuited(
        f"The model `{call.meant_for}` has no place now, and `{call.model}`, which stands in for it, can't take this "
        f"request: {failure.message} Send it again later.",
        retry_after_s=1.0,
    )


def _note_attempt(tries: Tries, lease: Lease, fingerprint: str) -> None:
    trail = tries.trail
    trail.attempts += 1
    trail.worker, trail.fingerprint = lease.worker, fingerprint
    trail.submitted_at = time.monotonic()
    tries.attempt = trail.record.asks(tries.call.model, lease.worker, lease.address, trail.attempts)
    trail.overtaken += lease.overtaken
    bid = bid_for(lease.ranking, lease.worker)
    trail.expected_cached = bid.cached_tokens if bid else 0
    if trail.debug:
        trail.placement = summary(lease.ranking, lease.worker)
