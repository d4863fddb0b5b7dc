"""Decides which workers suit a call: they are alive, do not fail call after call, and have the call's adapters."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from gateway.catalog.jobs import check_kind
from gateway.dispatch.call_state import CallState
from gateway.dispatch.upstream import Upstream
from gateway.registry.snapshot import FleetView
from gateway.routing.retries import Circuits
from gateway.telemetry.metrics import Metrics
from workers.protocol.events import Failed, FailureCode, Finished
from workers.protocol.heartbeat import Heartbeat, WorkerAddress

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.05
RECORD_WAIT_S = 1.0
"""Maximum seconds that a call with a slot waits for the record of a new worker, which tells its kind and adapters."""
ADAPTERS_S = 10.0
"""Maximum seconds that a call waits for a worker with its adapter. After that, a worker without it refuses the call."""
BLAMED = frozenset({FailureCode.INTERNAL, FailureCode.WORKER_LOST, FailureCode.OUT_OF_MEMORY, FailureCode.UNAVAILABLE})
"""Failures that are the worker's fault: enough of them in a row open its circuit, and then all calls avoid it."""


class SuitableWorkers:
    """Chooses the workers that a call avoids, and keeps the circuit breakers of all workers for that."""

    def __init__(self, fleet: FleetView, upstream: Upstream, metrics: Metrics) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._metrics = metrics
        self.circuits = Circuits()
        """The circuit breakers of the workers; times are time.monotonic()."""
        self._waiting_since: dict[CallState, float] = {}
        """Call that waits for a suitable worker before it is queued -> time.monotonic() when its wait began."""

    def reachable(self, model: str) -> list[Heartbeat]:
        """Return the model's workers that are not lost, sorted by id: the order in which their slots are numbered."""
        return [beat for beat in self._fleet.snapshot.of(model) if not self._upstream.is_lost(beat.boot)]

    def fingerprint(self, at: WorkerAddress) -> str:
        return next((beat.fingerprint for beat in self._fleet.snapshot.of(at.model) if beat.worker == at.worker), "")

    def width(self, at: WorkerAddress) -> int:
        """Return how many numbers a vector of this worker process has; 0: not known."""
        return next((beat.width for beat in self._fleet.snapshot.of(at.model) if beat.boot == at.boot), 0)

    def has_any(self, state: CallState, model: str) -> bool:
        """Return whether the model has a worker that the call need not avoid."""
        beats = [beat for beat in self._fleet.snapshot.of(model) if not beat.draining]
        return len(self._avoided(state, beats, time.monotonic(), going=False)) < len(beats)

    def avoided_now(self, state: CallState) -> frozenset[str]:
        """Return the workers that a queued call avoids now; this changes as workers recover or are replaced."""
        return self._avoided(state, self._fleet.snapshot.of(state.call.model), time.monotonic(), going=False)

    async def avoided(self, state: CallState) -> frozenset[str]:
        """Return the workers to avoid. If every worker is one of them, wait until one recovers or is replaced; after
        `queue_deadline`, return an empty set."""
        self._waiting_since[state] = time.monotonic()
        try:
            return await self._wait_for_one(state)
        finally:
            del self._waiting_since[state]

    async def check(self, state: CallState, at: WorkerAddress) -> None:
        """Check the kind and adapters of a worker that joined while the call waited. Wait at most RECORD_WAIT_S for the
        worker's record, since a slot can come first, and at most ADAPTERS_S until the worker has the call's adapters;
        after that the call is sent anyway, and the worker reports what it lacks. Raises NotSupported if the worker's
        kind is wrong."""
        began = time.monotonic()
        while (waited_s := time.monotonic() - began) < ADAPTERS_S:
            beat = next((beat for beat in self._fleet.snapshot.of(at.model) if beat.boot == at.boot), None)
            if beat is None:
                if waited_s >= RECORD_WAIT_S or self._upstream.is_lost(at.boot):
                    return
            else:
                if state.call.kind is not None:
                    check_kind(state.call.alias, state.call.kind, (beat,))
                if state.placement_request.adapters.issubset(beat.adapters):
                    return
            state.answer_log.queue_position.note_wait()
            await asyncio.sleep(CHECK_INTERVAL_S)

    def note_begin(self, at: WorkerAddress) -> None:
        """Record that the worker has begun an answer."""
        self.circuits.note_begin(at.boot, time.monotonic())

    def note_end(self, at: WorkerAddress, end: Finished | Failed | None) -> None:
        """Record how an answer that had begun ended. `end`: its last event; None: the caller did not wait for it."""
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
        """Record a failure that is the worker's fault: enough of them in a row open its circuit."""
        pause_s = self.circuits.note_failure(at.boot, time.monotonic())
        if pause_s and any(beat.boot == at.boot for beat in self._fleet.snapshot.of(at.model)):
            self._metrics.circuits_opened.labels(at.model).inc()
            fields = {"worker": at.worker, "model": at.model, "pause_s": round(pause_s, 2)}
            log.warning("worker fails call after call and is left alone", extra={"fields": fields})

    def num_avoided(self) -> dict[str, int]:
        """Return model -> number of its workers that all calls avoid now, because their circuits are not closed."""
        states = self.circuits.states(time.monotonic())
        return {
            model: sum(beat.boot in states and states[beat.boot].state != "closed" for beat in beats)
            for model, beats in self._fleet.snapshot.workers.items()
        }

    def waiting_for_worker(self) -> dict[str, tuple[int, float]]:
        """Return model -> (number of calls that wait for a suitable worker, longest wait so far in seconds)."""
        now = time.monotonic()
        found: dict[str, tuple[int, float]] = {}
        for state, since in self._waiting_since.items():
            number, longest_s = found.get(state.call.model, (0, 0.0))
            found[state.call.model] = (number + 1, max(longest_s, now - since))
        return found

    def _avoided(self, state: CallState, beats: Iterable[Heartbeat], now: float, *, going: bool) -> frozenset[str]:
        """Return the workers to avoid. `going`: the call is sent now; if all would be avoided, circuits don't count."""
        if not state.resting and not self._upstream.any_lost and self.circuits.all_new:
            return frozenset()  # the usual case, made quick for a thousand workers
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
        """Wait up to ADAPTERS_S until a worker has the call's adapters. New workers load the fleet's adapters soon."""
        call, adapters = state.call, state.placement_request.adapters
        until = min(call.queue_deadline, time.monotonic() + ADAPTERS_S)
        while time.monotonic() < until:
            beats = [beat for beat in self._fleet.snapshot.of(call.model) if not beat.draining]
            if not beats or any(adapters.issubset(beat.adapters) for beat in beats):
                return  # without workers the call waits in the queue
            state.answer_log.queue_position.note_wait()
            await asyncio.sleep(CHECK_INTERVAL_S)
