"""Sets metrics that are not counted per call: fleet and queue at each scrape, lost workers, the event loop's lag."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from gateway.registry.snapshot import FleetView, Turnover
from gateway.telemetry.metrics import Metrics
from workers.process.ticks import seconds_to_tick

LAG_INTERVAL_S = 0.2


async def measure_lag(observe: Callable[[float], None]) -> None:
    """Call `observe` every LAG_INTERVAL_S with the number of seconds by which a timer was late, until cancelled.

    Whatever keeps the event loop from running the timer in time delays all streams, too."""
    loop = asyncio.get_running_loop()
    while True:
        wait_s = seconds_to_tick(LAG_INTERVAL_S)
        due = loop.time() + wait_s
        await asyncio.sleep(wait_s)
        observe(max(0.0, loop.time() - due))


class AdmissionView(Protocol):
    """The part of admission that the gauges show: this gateway's own calls, by model."""

    def waiting(self, model: str) -> int: ...
    def in_flight(self, model: str) -> int: ...
    def oldest_wait_s(self) -> Mapping[str, float]: ...
    def predicted_wait_s(self, model: str) -> float: ...

    @property
    def models(self) -> Iterable[str]:
        """Models with calls that wait or hold a lease."""
        ...

    @property
    def degraded_models(self) -> frozenset[str]: ...

    @property
    def redis_up(self) -> bool: ...


class DispatchView(Protocol):
    """The part of dispatch that gauges show: calls outside the queue that wait for a worker, and avoided workers."""

    def waiting_for_worker(self) -> Mapping[str, tuple[int, float]]:
        """Return model -> how many calls wait for a suitable worker to appear, and the longest such wait in seconds."""
        ...

    def num_avoided(self) -> Mapping[str, int]:
        """Return model -> number of its workers that all calls avoid now."""
        ...


class Connections(Protocol):
    on_beyond: Callable[[str], None]

    @property
    def num_open(self) -> int: ...


class Sockets(Protocol):
    @property
    def num_open(self) -> int: ...


class GaugeCollector:
    """Collects the gauges. An `update` takes some milliseconds of the event loop for a fleet of a thousand workers."""

    def __init__(
        self,
        metrics: Metrics,
        fleet: FleetView,
        admission: AdmissionView,
        dispatch: DispatchView,
        named: Callable[[], frozenset[str]],
        stopping: Callable[[], bool],
        sockets: Sockets,
        wanted: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`named` returns the models of the catalog, which are shown even if nobody serves or calls them; `wanted`,
        model -> the workers that supervisors want it to have."""
        self._metrics = metrics
        self._fleet = fleet
        self._admission = admission
        self._dispatch = dispatch
        self._named = named
        self._stopping = stopping
        self._sockets = sockets
        self._wanted = wanted
        self._connections: Connections | None = None

    def follow(self, connections: Connections) -> None:
        """Have the gauges show the server's open `connections`. The server is made later than this collector."""
        self._connections = connections
        connections.on_beyond = lambda reason: self._metrics.beyond.labels(reason).inc()

    async def run(self) -> None:
        """Count the workers that come and go, and measure the event loop's lag, until cancelled."""
        starts, losses = self._metrics.worker_starts, self._metrics.worker_losses
        turnover = Turnover(
            self._fleet.snapshot,
            came=lambda model: starts.labels(model).inc(),
            went=lambda model, how: losses.labels(model, how).inc(),
        )
        self._fleet.listen(turnover.update)
        await measure_lag(self._metrics.loop_lag.observe)

    def update(self) -> None:
        """Set the gauges."""
        snapshot, now = self._fleet.snapshot, self._metrics
        unqueued = self._dispatch.waiting_for_worker()
        models = sorted(self._named() | snapshot.models | set(self._admission.models) | unqueued.keys())
        self._metrics.announce(models)
        self._update_queue(models, unqueued)
        self._update_fleet(models)
        admission = self._admission
        degraded_models = admission.degraded_models
        now.leases.replace({model: admission.in_flight(model) for model in models})
        now.without_redis.replace({model: model in degraded_models for model in models})
        now.circuits.replace(self._dispatch.num_avoided())
        now.redis_up.set(admission.redis_up)
        now.stopping.set(self._stopping())
        now.sockets.set(self._sockets.num_open)
        now.connections.set(self._connections.num_open if self._connections is not None else 0)
        self._metrics.process.count_tasks()

    def _update_queue(self, models: Iterable[str], unqueued: Mapping[str, tuple[int, float]]) -> None:
        length, oldest, predicted = dict[str, float](), dict[str, float](), dict[str, float]()
        waits, served = self._admission.oldest_wait_s(), self._fleet.snapshot.workers
        for model in models:
            num_unqueued, unqueued_s = unqueued.get(model, (0, 0.0))
            length[model] = self._admission.waiting(model) + num_unqueued
            oldest[model] = max(waits.get(model, 0.0), unqueued_s)
            # Nobody knows when the first worker will be there: the wait is at least what it has been so far.
            predicted[model] = self._admission.predicted_wait_s(model) if model in served else oldest[model]
        now = self._metrics
        now.queue_length.replace(length)
        now.queue_oldest.replace(oldest)
        now.predicted_wait.replace(predicted)

    def _update_fleet(self, models: Iterable[str]) -> None:
        workers, draining, slots, busy = (dict[str, float]() for _ in range(4))
        wanted = self._wanted()
        for model in models:
            beats = self._fleet.snapshot.of(model)
            serving = [beat for beat in beats if not beat.draining]
            workers[model], draining[model] = len(beats), len(beats) - len(serving)
            slots[model] = sum([beat.slots for beat in serving])
            busy[model] = sum([beat.slots_busy for beat in serving])
        now = self._metrics
        for gauge, values in (
            (now.workers, workers),
            (now.workers_draining, draining),
            (now.workers_wanted, {model: wanted[model] for model in models if model in wanted}),
            (now.slots, slots),
            (now.slots_busy, busy),
        ):
            gauge.replace(values)
