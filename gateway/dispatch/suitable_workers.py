"""Decides which workers suit a call: those that live, do not fail call after call, and have its adapters."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from gateway.catalog import check_kind
from gateway.dispatch.call_state import CallState
from gateway.dispatch.upstream import Upstream
from gateway.registry.snapshot import FleetView
from gateway.routing.retries import Circuits
from gateway.telemetry.metrics import Metrics
from workers.protocol.events import Failed, FailureCode, Finished
from workers.protocol.heartbeat import Heartbeat, WorkerAddress

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.05
ADAPTERS_S = 10.0
"""Seconds that a call waits for an adapter that is registered but on no worker; then a worker says what is wrong."""
BLAMED = frozenset({FailureCode.INTERNAL, FailureCode.WORKER_LOST, FailureCode.OUT_OF_MEMORY, FailureCode.UNAVAILABLE})
"""Failures that are the worker's own: enough of them in a row open its circuit, and all calls avoid it."""


class SuitableWorkers:
    """Chooses the workers that a call avoids, and keeps the circuit breakers that decide it."""

    def __init__(self, fleet: FleetView, upstream: Upstream, metrics: Metrics) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._metrics = metrics
        self.circuits = Circuits()
        """The circuits of the workers; their times are of time.monotonic()."""
        self._waiting_since: dict[CallState, float] = {}
        """Call that waits for a suitable worker before it is queued -> time.monotonic() when it began to."""

    def reachable(self, model: str) -> list[Heartbeat]:
        """Return the model's workers that are connected, by id: the order in which slots are numbered over them."""
        return [beat for beat in self._fleet.snapshot.of(model) if not self._upstream.is_lost(beat.boot)]

    def fingerprint(self, at: WorkerAddress) -> str:
        return next((beat.fingerprint for beat in self._fleet.snapshot.of(at.model) if beat.worker == at.worker), "")

    def has_any(self, state: CallState, model: str) -> bool:
        """Return whether the model has a worker that the call need not avoid."""
        beats = [beat for beat in self._fleet.snapshot.of(model) if not beat.draining]
        return len(self._avoided(state, beats, time.monotonic(), going=False)) < len(beats)

    def avoided_now(self, state: CallState) -> frozenset[str]:
        """Return the workers that a queued call avoids by now: workers recover, and are replaced."""
        return self._avoided(state, self._fleet.snapshot.of(state.call.model), time.monotonic(), going=False)

    async def avoided(self, state: CallState) -> frozenset[str]:
        """Return the workers to avoid; while that is all of them, wait for one to recover or to be replaced."""
        self._waiting_since[state] = time.monotonic()
        try:
            return await self._wait_for_one(state)
        finally:
            del self._waiting_since[state]

    async def check(self, state: CallState, at: WorkerAddress) -> None:
        """Check what was not known before the model's first worker came. Raises NotSupported if it does other work.

        Returns when the worker has the call's adapters, or after ADAPTERS_S: then it says itself what is wrong.
        """
        until = time.monotonic() + ADAPTERS_S
        while beat := next((beat for beat in self._fleet.snapshot.of(at.model) if beat.boot == at.boot), None):
            if state.call.kind is not None:
                check_kind(state.call.alias, state.call.kind, (beat,))
            if state.placement_request.adapters.issubset(beat.adapters) or time.monotonic() >= until:
                return
            state.answer_log.queue_position.note_wait()
            await asyncio.sleep(CHECK_INTERVAL_S)

    def note_begin(self, at: WorkerAddress) -> None:
        """Note that an answer has begun there."""
        self.circuits.note_begin(at.boot, time.monotonic())

    def note_end(self, at: WorkerAddress, end: Finished | Failed | None) -> None:
        """Note how a begun answer ended. `end`: its last event; None where its caller did not wait for it."""
        if isinstance(end, Finished):
            self.note_complete(at)
        elif isinstance(end, Failed):
            self.note_failure(at, end.failure.code)

    def note_complete(self, at: WorkerAddress) -> None:
        self.circuits.note_completion(at.boot, time.monotonic())

    def note_failure(self, at: WorkerAddress, code: FailureCode) -> None:
        if code in BLAMED:
            self.blame(at)

    def blame(self, at: WorkerAddress) -> None:
        """Note a failure that is the worker's own: enough of them in a row open its circuit."""
        pause_s = self.circuits.note_failure(at.boot, time.monotonic())
        if pause_s and any(beat.boot == at.boot for beat in self._fleet.snapshot.of(at.model)):
            self._metrics.circuits_opened.labels(at.model).inc()
            fields = {"worker": at.worker, "model": at.model, "pause_s": round(pause_s, 2)}
            log.warning("worker fails call after call and is left alone", extra={"fields": fields})

    def num_avoided(self) -> dict[str, int]:
        """Return how many workers of each model calls avoid now."""
        states = self.circuits.states(time.monotonic())
        return {
            model: sum(beat.boot in states and states[beat.boot].state != "closed" for beat in beats)
            for model, beats in self._fleet.snapshot.workers.items()
        }

    def waiting_for_worker(self) -> dict[str, tuple[int, float]]:
        """Return for each model how many calls wait for a suitable worker, and the first one's wait in seconds."""
        now = time.monotonic()
        found: dict[str, tuple[int, float]] = {}
        for state, since in self._waiting_since.items():
            number, longest_s = found.get(state.call.model, (0, 0.0))
            found[state.call.model] = (number + 1, max(longest_s, now - since))
        return found

    def _avoided(self, state: CallState, beats: Iterable[Heartbeat], now: float, *, going: bool) -> frozenset[str]:
        """Return the workers to avoid. A call that is `going` takes one with an open circuit if there is no other."""
        if not state.resting and not self._upstream.any_lost and self.circuits.all_new:
            return frozenset()  # as nearly always, and there may be a thousand workers
        beats = tuple(beats)
        out = {
            beat.worker
            for beat in beats
            if state.resting.get(beat.boot, 0.0) > now or self._upstream.is_lost(beat.boot)
        }
        alone = {beat.worker for beat in beats if not self.circuits.admits(beat.boot, state, now, going=going)}
        return frozenset(out if going and len(out | alone) == len(beats) else out | alone)

    async def _wait_for_one(self, state: CallState) -> frozenset[str]:
        call = state.call
        if state.placement_request.adapters:
            await self._wait_for_adapters(state)
        while True:
            now, beats = time.monotonic(), self._fleet.snapshot.of(call.model)
            avoided = self._avoided(state, beats, now, going=True)
            if len(avoided) < len(beats):
                return avoided
            if not beats or now >= call.queue_deadline:
                return frozenset()
            state.answer_log.queue_position.note_wait()
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def _wait_for_adapters(self, state: CallState) -> None:
        """Return when a worker has the call's adapters, or after ADAPTERS_S: new workers get registered ones soon."""
        call, adapters = state.call, state.placement_request.adapters
        until = min(call.queue_deadline, time.monotonic() + ADAPTERS_S)
        while time.monotonic() < until:
            beats = [beat for beat in self._fleet.snapshot.of(call.model) if not beat.draining]
            if not beats or any(adapters.issubset(beat.adapters) for beat in beats):
                return  # without workers the call waits in line
            state.answer_log.queue_position.note_wait()
            await asyncio.sleep(CHECK_INTERVAL_S)
