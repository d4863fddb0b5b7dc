"""Prometheus' counters, gauges and histograms, with a bound on their series, and cheap enough to count many streams.
They are declared where they are created, in the groups that docs/metrics.md lists.

They extend those of `prometheus_client` and are used like them. A metric keeps at most `MAX_SERIES` series; `labels` is
one look-up in a dict if the series exists; values are plain numbers, and a histogram finds a bucket by bisection;
`lines` writes a series without making samples (docs/performance.md). There are no exemplars and no times of creation.

One thread counts, any thread can collect. The methods overridden here are not a public interface of the library, so
pyproject.toml caps its version.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import accumulate
from math import isfinite
from typing import Self

import prometheus_client
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import INF, floatToGoString

MAX_SERIES = 20_000
"""Maximum number of series of one metric; later ones are counted under `OTHER`, so that ever new names can't fill the
memory."""
OTHER = "other"


class Family(Metric):
    """One metric at a scrape. `workers.metrics.page` writes its `lines`; others who read the registry use `samples`."""

    def __init__(self, metric: Bounded) -> None:
        self.name, self.documentation, self.type, self.unit = metric._name, metric._documentation, str(metric._type), ""
        self._metric = metric

    @cached_property
    def samples(self) -> list[Sample]:  # type: ignore[override]  # the base sets it
        return [sample._replace(name=self.name + sample.name) for sample in self._metric._samples()]

    def lines(self) -> Iterator[str]:
        """Yield the text of each series, which is the same in both of Prometheus' formats."""
        metric = self._metric
        # Copying is atomic; another thread may add series while this one iterates.
        for series in metric._metrics.copy().values() if metric._labelnames else (metric,):
            yield series._text()  # type: ignore[union-attr]  # series are of their metric's class


class Bounded(MetricWrapperBase):
    """The base of all kinds of metrics."""

    _named: tuple[str, ...] = ()
    """The parts of a series' lines that come before the numbers (name, labels), made when first needed."""

    def labels(self, *labelvalues: object, **labelkwargs: object) -> Self:
        """Return the series with these label values, or that of `OTHER` if it is new and `MAX_SERIES` exist already."""
        # Values that are no strings are not found here, but as strings further down.
        series: Self | None = self._metrics.get(labelvalues)  # type: ignore[assignment, arg-type]
        if series is not None:
            return series
        if labelkwargs and labelkwargs.keys() == set(self._labelnames):
            return self.labels(*(labelkwargs[name] for name in self._labelnames))
        labelvalues = tuple(map(str, labelvalues))
        is_full = len(self._metrics) >= MAX_SERIES and len(labelvalues) == len(self._labelnames)
        if is_full and labelvalues not in self._metrics:
            labelvalues = (OTHER,) * len(self._labelnames)
        return super().labels(*labelvalues, **labelkwargs)

    def collect(self) -> tuple[Family]:
        """Return this metric in the form that a registry collects. Can be called on any thread."""
        return (Family(self),)

    def _text(self) -> str:
        """Return the lines of one series."""
        raise NotImplementedError


class _Number(Bounded):
    """A metric with one number in each series."""

    _suffix = ""

    def _metric_init(self) -> None:
        self._number = 0.0

    def _text(self) -> str:
        if not self._named:
            self._named = (f"{self._name}{self._suffix}{_braced(_pairs(self))} ",)
        return f"{self._named[0]}{_number_text(self._number)}\n"

    def _child_samples(self) -> tuple[Sample]:
        return (Sample(self._suffix, {}, self._number),)


class Counter(_Number, prometheus_client.Counter):
    _suffix = "_total"

    def inc(self, amount: float = 1.0, exemplar: dict[str, str] | None = None) -> None:
        if amount < 0:
            raise ValueError(f"{self._name} is a counter and can't fall by {-amount}")
        self._number += amount

    def reset(self) -> None:
        self._number = 0.0


class Gauge(_Number, prometheus_client.Gauge):
    def inc(self, amount: float = 1.0) -> None:
        self._number += amount

    def dec(self, amount: float = 1.0) -> None:
        self._number -= amount

    def set(self, value: float) -> None:
        self._number = float(value)

    def set_function(self, f: Callable[[], float]) -> None:
        raise NotImplementedError(f"{self._name} keeps a number; register a collector for what is read elsewhere")

    def replace(self, values: Mapping[str, float]) -> None:
        """Set the values of a gauge with one label: label value -> number. Drop all other series."""
        for gone in self._metrics.keys() - {(label,) for label in values}:
            self.remove(*gone)
        for label, value in values.items():
            self.labels(label).set(value)


class Histogram(Bounded, prometheus_client.Histogram):
    def _metric_init(self) -> None:
        self._counts = [0] * len(self._upper_bounds)
        self._total = 0.0

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        self._counts[bisect_left(self._upper_bounds, amount)] += 1
        self._total += amount

    def _text(self) -> str:
        if not self._named:
            name, pairs = self._name, _pairs(self)
            before = "".join(f"{pair}," for pair in pairs if pair < "le")
            after = "".join(f",{pair}" for pair in pairs if pair >= "le")
            braced = _braced(pairs)
            self._named = (
                f'{name}_bucket{{{before}le="',
                f'"{after}}} ',
                f"{name}_count{braced} ",
                f"{name}_sum{braced} ",
            )
        before, after, count, total = self._named
        below = list(accumulate(self._counts))
        rows = [f"{before}{bound_text(bound)}{after}{n}.0" for bound, n in zip(self._upper_bounds, below, strict=True)]
        return "\n".join([*rows, f"{count}{below[-1]}.0", f"{total}{_number_text(self._total)}\n"])

    def _child_samples(self) -> tuple[Sample, ...]:
        below, bounds = [float(count) for count in accumulate(self._counts)], map(bound_text, self._upper_bounds)
        buckets = [Sample("_bucket", {"le": bound}, count) for bound, count in zip(bounds, below, strict=True)]
        return (*buckets, Sample("_count", {}, below[-1]), Sample("_sum", {}, self._total))


@lru_cache(256)
def bound_text(bound: float) -> str:
    """Return the value of the label `le` for a bucket's upper bound."""
    return "+Inf" if bound == INF else repr(bound)


def _number_text(number: float) -> str:
    return repr(number) if isfinite(number) else str(floatToGoString(number))  # type: ignore[no-untyped-call]


def _pairs(series: Bounded) -> list[str]:
    return [
        f'{name}="{_escaped(value)}"'
        for name, value in sorted(zip(series._labelnames, series._labelvalues, strict=True))
    ]


def _braced(pairs: list[str]) -> str:
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class When(StrEnum):
    """When a metric's value changes; the texts are those of docs/metrics.md."""

    ENDED = "a request has ended"
    HAPPENS = "it happens"
    SCRAPE = "somebody scrapes"
    START = "the process starts"


@dataclass(frozen=True, slots=True)
class Declaration:
    """Declares one metric. Its name contains its unit; labels have few values, and never a caller's text."""

    name: str
    """Name as it is scraped. A counter's ends in `_total`, which OpenMetrics leaves out in the lines of type and help.
    """
    kind: Kind
    help: str
    """One line of Markdown, for the scrape and for docs/metrics.md."""
    labels: tuple[str, ...] = ()
    set_when: When = When.SCRAPE
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without the infinite one."""

    @property
    def series(self) -> tuple[str, ...]:
        """The names of the metric's samples."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))
        return (self.name,)


# Buckets as in vLLM, so that quantiles can be compared.
TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
E2E_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
GAP_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
TOKENS = tuple(
    float(many) for many in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
)

# Buckets as OpenTelemetry recommends (semantic conventions, generative AI metrics).
GEN_AI_DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
GEN_AI_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
GEN_AI_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
GEN_AI_TOKENS = tuple(float(4**power) for power in range(14))

OVERHEAD_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)
REDIS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
LAG_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
DECODE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LOAD_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True)
class Group:
    """Metrics of one registry, which one table of docs/metrics.md lists. Its methods create and declare them."""

    title: str
    registry: CollectorRegistry
    metrics: list[Declaration] = field(default_factory=list)

    def counter(self, name: str, help_: str, labels: tuple[str, ...] = (), when: When = When.HAPPENS) -> Counter:
        self.metrics.append(Declaration(name, Kind.COUNTER, help_, labels, when))
        return Counter(name, help_, labels, registry=self.registry)

    def gauge(self, name: str, help_: str, labels: tuple[str, ...] = (), when: When = When.SCRAPE) -> Gauge:
        self.metrics.append(Declaration(name, Kind.GAUGE, help_, labels, when))
        return Gauge(name, help_, labels, registry=self.registry)

    def histogram(
        self, name: str, help_: str, labels: tuple[str, ...], buckets: tuple[float, ...], when: When = When.ENDED
    ) -> Histogram:
        self.metrics.append(Declaration(name, Kind.HISTOGRAM, help_, labels, when, buckets))
        return Histogram(name, help_, labels, registry=self.registry, buckets=buckets)

    def collector(self, collector: Collector, when: When = When.SCRAPE) -> None:
        """Add a collector of `prometheus_client`; the labels of its metrics must always be the same."""
        self.registry.register(collector)
        for family in collector.collect():
            kind, labels = Kind(family.type), tuple(family.samples[0].labels)
            name = family.name + ("_total" if kind is Kind.COUNTER else "")
            self.metrics.append(Declaration(name, kind, family.documentation.rstrip("."), labels, when))


class ProcessMetrics:
    """The metrics of any process: those that `prometheus_client` collects, and the number of the event loop's tasks.
    Metrics that begin with `process_` need `/proc`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.group = Group("Every process", registry)
        self.group.collector(ProcessCollector(registry=None))
        self.group.collector(PlatformCollector(registry=None), When.START)
        self._tasks = self.group.gauge("paddock_event_loop_tasks", "tasks of its event loop, those that wait included")

    def count_tasks(self) -> None:
        """Count the event loop's tasks. Call it on the event loop only. Some thousands of tasks take a millisecond."""
        self._tasks.set(len(asyncio.all_tasks()))
