"""What a scrape says, read by Prometheus' own parser."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from workers.metrics.page import slices
from workers.metrics.types import Declaration, Kind

Series = tuple[str, tuple[tuple[str, str], ...]]


def page_of(registry: CollectorRegistry) -> str:
    """Return the text that a scraper of this registry gets."""
    return b"".join(slices(registry)).decode()


class Scrape:
    """Raises ValueError for text that is not in Prometheus' format."""

    def __init__(self, text: str) -> None:
        self.kinds: dict[str, str] = {}
        """Name as dashboards write it -> type."""
        self.labels: dict[str, set[frozenset[str]]] = {}
        """The same -> the sets of label names that its series have, without `le`."""
        self.values: dict[Series, float] = {}
        for family in text_string_to_metric_families(text):
            name = family.name + ("_total" if family.type == "counter" else "")
            self.kinds[name] = family.type
            named = self.labels.setdefault(name, set())
            for sample in family.samples:
                named.add(frozenset(sample.labels) - {"le"})
                self.values[sample.name, tuple(sorted(sample.labels.items()))] = sample.value

    def value(self, name: str, **labels: str) -> float:
        """Of one series. Raises KeyError where there is none."""
        return self.values[name, tuple(sorted(labels.items()))]

    def sum(self, name: str, **labels: str) -> float:
        """Of all series that have these labels."""
        wanted = set(labels.items())
        return sum(value for (of, has), value in self.values.items() if of == name and wanted <= set(has))

    def has_exactly(self, metrics: tuple[Declaration, ...]) -> None:
        """Its names, types and labels are those that are declared."""
        declared = {metric.name: metric for metric in metrics}
        assert self.kinds == {name: str(metric.kind) for name, metric in declared.items()}
        for name, sets in self.labels.items():
            assert sets <= {frozenset(declared[name].labels)}, name
        for metric in metrics:
            if metric.kind is Kind.HISTOGRAM:
                bounds = {dict(has).get("le") for of, has in self.values if of == f"{metric.name}_bucket"}
                assert not bounds or bounds == {*map(repr, metric.buckets), "+Inf"}, metric.name
