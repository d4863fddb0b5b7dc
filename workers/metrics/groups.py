"""Creates metrics in a registry, in the groups that docs/metrics.md lists: a metric is declared where it is created."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from workers.metrics.declaration import Kind, Metric, When
from workers.metrics.types import Counter, Gauge, Histogram


@dataclass(frozen=True, slots=True)
class Group:
    """Metrics of one registry that one table of docs/metrics.md lists."""

    title: str
    registry: CollectorRegistry
    metrics: list[Metric] = field(default_factory=list)

    def counter(self, name: str, help_: str, labels: tuple[str, ...] = (), when: When = When.HAPPENS) -> Counter:
        self.metrics.append(Metric(name, Kind.COUNTER, help_, labels, when))
        return Counter(name, help_, labels, registry=self.registry)

    def gauge(self, name: str, help_: str, labels: tuple[str, ...] = (), when: When = When.SCRAPE) -> Gauge:
        self.metrics.append(Metric(name, Kind.GAUGE, help_, labels, when))
        return Gauge(name, help_, labels, registry=self.registry)

    def histogram(
        self, name: str, help_: str, labels: tuple[str, ...], buckets: tuple[float, ...], when: When = When.ENDED
    ) -> Histogram:
        self.metrics.append(Metric(name, Kind.HISTOGRAM, help_, labels, when, buckets))
        return Histogram(name, help_, labels, registry=self.registry, buckets=buckets)

    def collector(self, collector: Collector, when: When = When.SCRAPE) -> None:
        """Take in a collector of the library's, whose metrics have the same labels at all times."""
        self.registry.register(collector)
        for family in collector.collect():
            kind, labels = Kind(family.type), tuple(family.samples[0].labels)
            name = family.name + ("_total" if kind is Kind.COUNTER else "")
            self.metrics.append(Metric(name, kind, family.documentation.rstrip("."), labels, when))
