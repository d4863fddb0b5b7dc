"""Prometheus' counters, gauges and histograms, with a bound on their series and at a cost that suits many streams.

They are used like those of `prometheus_client`, which they extend: a metric keeps at most `MAX_SERIES` series; `labels`
is one look-up in a dict where the series is there; values are plain numbers, and a histogram finds a bucket by
bisection; `lines` writes a series without making samples of it (docs/performance.md). They keep no exemplars and no
times of creation.

One thread counts, any thread may collect. What is overridden here is no public interface of the library, so
pyproject.toml caps its version.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, lru_cache
from itertools import accumulate
from math import isfinite
from typing import Self

import prometheus_client
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import INF, floatToGoString

MAX_SERIES = 20_000
"""Most series of one metric. Later ones are counted under `OTHER`: names that come and go can't fill the memory."""
OTHER = "other"


class Family(Metric):
    """One metric at a scrape. Its samples are made only for those who ask; the page of this process writes `lines`."""

    def __init__(self, metric: Bounded) -> None:
        self.name, self.documentation, self.type, self.unit = metric._name, metric._documentation, str(metric._type), ""
        self._metric = metric

    @cached_property
    def samples(self) -> list[Sample]:  # type: ignore[override]  # the base sets it
        return [sample._replace(name=self.name + sample.name) for sample in self._metric._samples()]

    def lines(self) -> Iterator[str]:
        """Yield the text of one series after the other, which is the same in both of Prometheus' formats."""
        metric = self._metric
        # A copy is made in one go; the other thread may add series meanwhile.
        for series in metric._metrics.copy().values() if metric._labelnames else (metric,):
            yield series._text()  # type: ignore[union-attr]  # series are of their metric's class


class Bounded(MetricWrapperBase):
    """The base of all kinds of metrics."""

    _named: tuple[str, ...] = ()
    """The texts of a series before its numbers, made when it is first written."""

    def labels(self, *labelvalues: object, **labelkwargs: object) -> Self:
        """Return the series with these values of the labels; past the bound, the one of all later series."""
        # Labels that are no strings miss, and are found further down.
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
        """Return this metric as a registry collects it. For any thread."""
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
        """Set the series of a gauge with one label, and drop all others."""
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
    """Return the value of the label `le`."""
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
