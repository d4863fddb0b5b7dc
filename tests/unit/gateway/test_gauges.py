"""What a gateway sees of its fleet and its line when it is scraped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from gateway.api.http.sockets import Sockets
from gateway.gauges import GaugeCollector
from gateway.registry.snapshot import FleetSnapshot
from gateway.telemetry.metrics import Metrics
from tests.support.scrape import Scrape, page_of
from tests.unit.gateway.registry.test_turnover import beat, fleet
from workers.http_server.connections import ConnectionBounds, Connections


@dataclass(slots=True)
class Seen:
    snapshot: FleetSnapshot
    listeners: list[Callable[[FleetSnapshot], None]] = field(default_factory=list)

    def listen(self, on_change: Callable[[FleetSnapshot], None]) -> None:
        self.listeners.append(on_change)


@dataclass(frozen=True, slots=True)
class Line:
    """One model has two calls in line and three with a slot, another one call in line and no worker."""

    waits: Mapping[str, float] = field(default_factory=lambda: {"m": 4.0, "empty": 9.0})
    models: tuple[str, ...] = ("m", "empty")
    degraded_models: frozenset[str] = frozenset({"m"})
    redis_up: bool = False

    def waiting(self, model: str) -> int:
        return {"m": 2, "empty": 1}.get(model, 0)

    def in_flight(self, model: str) -> int:
        return 3 if model == "m" else 0

    def oldest_wait_s(self) -> Mapping[str, float]:
        return self.waits

    def predicted_wait_s(self, model: str) -> float:
        return 1.5


class Dispatch:
    def waiting_for_worker(self) -> dict[str, tuple[int, float]]:
        return {"m": (5, 7.0), "adapted": (1, 2.0)}

    def num_avoided(self) -> dict[str, int]:
        return {"m": 1}


def collector(seen: Seen, metrics: Metrics) -> GaugeCollector:
    return GaugeCollector(
        *(metrics, seen, Line(), Dispatch(), lambda: frozenset({"named"}), lambda: True, Sockets(5, 5)),
        wanted=lambda: {"named": 2, "m": 0, "nobody's": 9},
    )


async def test_the_line_and_the_fleet_are_shown_as_they_are() -> None:
    metrics = Metrics(CollectorRegistry())
    collector(Seen(fleet(beat("a", "1"), beat("b", "2"), beat("c", "3", draining=True))), metrics).update()
    shown = Scrape(page_of(metrics.registry))

    def values(name: str) -> dict[str, float]:
        models = ("m", "empty", "adapted", "named")
        return {model: shown.value(f"paddock_{name}", model=model) for model in models}

    assert values("queue_length") == {"m": 7, "empty": 1, "adapted": 1, "named": 0}, "the unqueued wait, too"
    assert values("queue_oldest_seconds") == {"m": 7, "empty": 9, "adapted": 2, "named": 0}
    assert values("predicted_wait_seconds") == {"m": 1.5, "empty": 9, "adapted": 2, "named": 0}
    assert values("leases") == {"m": 3, "empty": 0, "adapted": 0, "named": 0}
    assert values("without_redis") == {"m": 1, "empty": 0, "adapted": 0, "named": 0}
    assert values("workers") == {"m": 3, "empty": 0, "adapted": 0, "named": 0}
    assert [shown.value(f"paddock_{name}", model="m") for name in ("workers_draining", "slots", "circuits")] == [
        1,
        2,
        1,
    ]
    wanted = [line for line in page_of(metrics.registry).splitlines() if line.startswith("paddock_workers_wanted")]
    assert sorted(wanted) == ['paddock_workers_wanted{model="m"} 0.0', 'paddock_workers_wanted{model="named"} 2.0']
    assert (shown.value("paddock_redis_up"), shown.value("paddock_stopping")) == (0, 1)


async def test_models_that_are_gone_are_not_shown_any_more() -> None:
    metrics, seen = Metrics(CollectorRegistry()), Seen(fleet(old=(beat("a", "1"),)))
    looking = collector(seen, metrics)
    seen.snapshot = FleetSnapshot({"old": (beat("a", "1"),)}, frozenset({"old"}))
    looking.update()
    assert 'paddock_workers{model="old"} 1.0' in page_of(metrics.registry)
    seen.snapshot = FleetSnapshot()
    looking.update()
    assert 'paddock_workers{model="old"}' not in page_of(metrics.registry)


async def test_who_comes_and_how_late_the_loop_is() -> None:
    metrics, seen = Metrics(CollectorRegistry()), Seen(fleet(beat("a", "1")))
    watching = asyncio.create_task(collector(seen, metrics).run())
    await asyncio.sleep(0.25)
    for listener in seen.listeners:
        listener(fleet(beat("b", "2")))
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    shown = Scrape(page_of(metrics.registry))
    assert shown.value("paddock_worker_starts_total", model="m") == 1
    assert shown.value("paddock_worker_losses_total", model="m", how="lost") == 1
    assert 1 <= shown.value("paddock_loop_lag_seconds_count") <= 3


async def test_connections_and_those_beyond_a_bound_are_shown() -> None:
    metrics = Metrics(CollectorRegistry())
    shown = collector(Seen(fleet()), metrics)
    connections = Connections(ConnectionBounds(2, 1, 1024))
    shown.follow(connections)
    for address in ("10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.3"):
        connections.came(Connection(), address, 100)
    connections.came(Connection(), "10.0.0.4", 1023)
    shown.update()
    scrape = Scrape(page_of(metrics.registry))
    assert (scrape.value("paddock_connections"), scrape.value("paddock_websockets")) == (5, 0)
    beyond = [scrape.value("paddock_connections_beyond_total", reason=reason) for reason in ("address", "all")]
    assert beyond == [1, 2]
    connections = Connections(ConnectionBounds(9, 9, 1024))
    shown.follow(connections)
    connections.came(Connection(), "10.0.0.4", 1023)
    assert Scrape(page_of(metrics.registry)).value("paddock_connections_beyond_total", reason="descriptors") == 1


class Connection:
    """One that does nothing."""

    def make_room(self) -> None: ...

    def cut_unfinished(self) -> None: ...
