"""The metrics of one process, as the catalogue declares them, and the text of a scrape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from workers.protocol.metrics.families import Counter, Family, Gauge, Histogram
from workers.protocol.metrics.metric import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SLICE_BYTES = 32 << 10
"""Bytes rendered in one go: some tenths of a millisecond in which no other thread gets on."""
REST_S = 0.0001
"""Seconds of pause, in which a waiting thread can wake up; a pause of 0 would be over before it does."""


class Book:
    """The metrics of one process. Each is opened once, by the part that counts it; undeclared ones can't be opened."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._declared = tuple(metrics)
        self._families: dict[str, Family] = {}
        self._readings: list[Callable[[], None]] = []

    def counter(self, metric: Metric) -> Counter:
        family = Counter(metric)
        self._open(family)
        return family

    def gauge(self, metric: Metric) -> Gauge:
        family = Gauge(metric)
        self._open(family)
        return family

    def histogram(self, metric: Metric) -> Histogram:
        family = Histogram(metric)
        self._open(family)
        return family

    def read_first(self, reading: Callable[[], None]) -> None:
        """Have `reading` called at the start of each rendering, in its thread, to set what nobody sets in between."""
        self._readings.append(reading)

    @property
    def unopened(self) -> tuple[Metric, ...]:
        """The metrics that are declared and that nobody has opened."""
        return tuple(metric for metric in self._declared if metric.name not in self._families)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format, rendered at once."""
        return b"".join(self.slices())

    def render_aside(self) -> bytes:
        """Return the same text, rendered in a background thread: the busy thread waits for a slice at most."""
        done = []
        for piece in self.slices():
            done.append(piece)
            time.sleep(REST_S)
        return b"".join(done)

    def slices(self) -> Iterable[bytes]:
        """Yield the text in pieces: making one holds the interpreter for less than a millisecond."""
        for reading in self._readings:
            reading()
        text, size = list[str](), 0
        for metric in self._declared:
            family = self._families.get(metric.name)
            if family is None:
                continue
            text.append(family.head)
            for lines in family.lines():
                text.append(lines)
                size += len(lines)
                if size > SLICE_BYTES:
                    yield "".join(text).encode()
                    text, size = [], 0
        yield "".join(text).encode()

    def _open(self, family: Family) -> None:
        metric = family.metric
        if metric not in self._declared:
            raise ValueError(f"{metric.name} is not in the catalogue of this process")
        if metric.name in self._families:
            raise ValueError(f"{metric.name} is counted by somebody else already")
        self._families[metric.name] = family
