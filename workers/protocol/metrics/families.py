"""Counters, gauges and histograms, which hold the values of one metric by its labels.

One thread writes, any thread may render. Adding to a series that is there takes less than a microsecond and rendering a
line about half of one. Prometheus' own client takes ten times as long for either, and the streams of a gateway with 50
models and 20 teams would wait so long at each scrape (docs/performance.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from workers.protocol.metrics.metric import Kind, Metric

MAX_SERIES = 20_000
"""Most series of one metric. Later ones are counted under `OTHER`: names that come and go can't fill the memory."""
OTHER = "other"

Labels = tuple[str, ...]
"""Values of labels, in the order in which the metric declares their names."""


class Family(ABC):
    """The base of all kinds of metrics."""

    kind: Kind

    def __init__(self, metric: Metric) -> None:
        if metric.kind is not self.kind:
            raise ValueError(f"{metric.name} is declared as a {metric.kind}, not a {self.kind}")
        self.metric = metric
        self._other = tuple(OTHER for _ in metric.labels)

    @property
    def head(self) -> str:
        name, about = self.metric.name, self.metric.help.replace("\\", r"\\").replace("\n", r"\n")
        return f"# HELP {name} {about}\n# TYPE {name} {self.kind}\n"

    @abstractmethod
    def lines(self) -> Iterator[str]:
        """Yield the text, some lines at a time. For any thread."""

    def _admitted(self, labels: Labels, num_series: int) -> Labels:
        if len(labels) != len(self._other):
            raise ValueError(f"{self.metric.name} has the labels {self.metric.labels}, and got {labels}")
        return labels if num_series < MAX_SERIES else self._other


class _Plain(Family):
    """One number for each set of labels."""

    def __init__(self, metric: Metric) -> None:
        super().__init__(metric)
        self._values: dict[Labels, float] = {}
        self._names: dict[Labels, str] = {}
        if not metric.labels:
            self._values[()] = 0.0

    def value(self, *labels: str) -> float:
        """Return the value of a series; 0 where there is none."""
        return self._values.get(labels, 0.0)

    def lines(self) -> Iterator[str]:
        # A copy is made in one go; the other thread may add series meanwhile.
        values, names = self._values.copy(), self._names
        if len(names) > len(values):  # some names are of series that are gone
            names = self._names = {labels: name for labels, name in names.copy().items() if labels in values}
        for labels, value in values.items():
            name = names.get(labels)
            if name is None:
                name = names[labels] = f"{self.metric.name}{_braced(self.metric.labels, labels)} "
            yield f"{name}{value!r}\n"

    def _add(self, labels: Labels, by: float) -> None:
        try:
            self._values[labels] += by
        except KeyError:
            labels = self._admitted(labels, len(self._values))
            self._values[labels] = self._values.get(labels, 0.0) + by


class Counter(_Plain):
    kind = Kind.COUNTER

    def inc(self, *labels: str, by: float = 1.0) -> None:
        self._add(labels, by)

    def become(self, value: float, *labels: str) -> None:
        """Set the counter to a number that is counted elsewhere."""
        self._values[labels] = float(value)


class Gauge(_Plain):
    kind = Kind.GAUGE

    def inc(self, *labels: str, by: float = 1.0) -> None:
        self._add(labels, by)

    def set(self, value: float, *labels: str) -> None:
        self._values[labels] = float(value)

    def replace(self, values: Mapping[str, float]) -> None:
        """Set the series of a gauge with one label, and drop all others."""
        self._values = {(label,): float(value) for label, value in values.items()}

    def only(self, value: float, *labels: str) -> None:
        """Set this series, and drop all others."""
        self._values = {labels: float(value)}


class Histogram(Family):
    kind = Kind.HISTOGRAM

    def __init__(self, metric: Metric) -> None:
        super().__init__(metric)
        self._bounds = metric.buckets
        self._cells: dict[Labels, list[float]] = {}
        """Labels -> the number of values in each bucket and above them all, then the sum of the values."""
        self._bucket_labels = [f'le="{bound!r}"' for bound in self._bounds] + ['le="+Inf"']
        self._names: dict[Labels, tuple[str, str, str, str]] = {}
        if not metric.labels:
            self._cells[()] = self._empty()

    def observe(self, value: float, *labels: str) -> None:
        cell = self._cells.get(labels)
        if cell is None:
            cell = self._cells.setdefault(self._admitted(labels, len(self._cells)), self._empty())
        cell[bisect_left(self._bounds, value)] += 1
        cell[-1] += value

    def become(self, counts: Sequence[int], total: float, *labels: str) -> None:
        """Set the histogram to what is counted elsewhere: `counts` per bucket and above them all."""
        if len(counts) != len(self._bounds) + 1:
            raise ValueError(f"{self.metric.name} has {len(self._bounds) + 1} buckets, and got {len(counts)}")
        self._cells[labels] = [*map(float, counts), float(total)]

    def count(self, *labels: str) -> float:
        """Return the number of values; 0 where there is no such series."""
        return sum(self._cells.get(labels, [0.0])[:-1])

    def lines(self) -> Iterator[str]:
        names = self._names
        for labels, cell in self._cells.copy().items():
            name = names.get(labels)
            if name is None:
                name = names[labels] = self._named(labels)
            before, after, count, total = name
            *counts, value = cell.copy()
            below = list(accumulate(counts))
            rows = [f"{before}{le}{after}{number!r}" for le, number in zip(self._bucket_labels, below, strict=True)]
            yield "\n".join([*rows, f"{count}{below[-1]!r}", f"{total}{value!r}\n"])

    def _empty(self) -> list[float]:
        return [0.0] * (len(self._bounds) + 2)

    def _named(self, labels: Labels) -> tuple[str, str, str, str]:
        name, pairs = self.metric.name, _pairs(self.metric.labels, labels)
        before = "".join(f"{pair}," for pair in pairs if pair < "le")
        after = "".join(f",{pair}" for pair in pairs if pair >= "le")
        braced = _braced(self.metric.labels, labels)
        return f"{name}_bucket{{{before}", f"{after}}} ", f"{name}_count{braced} ", f"{name}_sum{braced} "


def _pairs(names: Labels, values: Labels) -> list[str]:
    return [f'{name}="{_escaped(value)}"' for name, value in sorted(zip(names, values, strict=True))]


def _braced(names: Labels, values: Labels) -> str:
    return f"{{{','.join(_pairs(names, values))}}}" if names else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
