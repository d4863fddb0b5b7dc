"""Counting, and what a scrape gets of it."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc

import prometheus_client
import pytest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families

from tests.support.scrape import Scrape, page_of
from workers.metrics import types
from workers.metrics.page import OPENMETRICS, TEXT, slices, written_aside
from workers.metrics.types import Counter, Gauge, Histogram


class Counted:
    """A registry with metrics of each kind."""

    def __init__(self) -> None:
        self.registry = registry = prometheus_client.CollectorRegistry()
        self.calls = Counter("calls_total", 'a "help" with \\ and\nlines', ("who", "how"), registry=registry)
        self.level = Gauge("level", "a level", ("zone",), registry=registry)
        self.took = Histogram("took_seconds", "times", ("model", "alias"), registry=registry, buckets=(0.1, 1.0, 4e6))
        self.alone = Gauge("alone", "without labels", registry=registry)
        self.lag = Histogram("lag_seconds", "without labels", registry=registry, buckets=(0.5,))

    def fill(self) -> None:
        self.calls.labels("me", 'say "x\\y"\n').inc()
        self.calls.labels("me", 'say "x\\y"\n').inc(2)
        self.level.labels("north").set(1.5)
        self.level.labels("south").set(float("inf"))
        for value in (0.05, 0.1, 0.5, 7e3):
            self.took.labels("m", "a").observe(value)

    @property
    def shown(self) -> Scrape:
        return Scrape(page_of(self.registry))


def test_what_is_counted_is_shown() -> None:
    counted = Counted()
    counted.fill()
    shown = counted.shown
    assert shown.value("calls_total", who="me", how='say "x\\y"\n') == 3
    assert shown.value("level", zone="north") == 1.5
    buckets = {"0.1": 2, "1.0": 3, "4000000.0": 4, "+Inf": 4}
    found = {le: shown.value("took_seconds_bucket", model="m", alias="a", le=le) for le in buckets}
    assert found == buckets, "a bucket holds what is not above it"
    assert shown.value("took_seconds_count", model="m", alias="a") == 4
    assert shown.value("took_seconds_sum", model="m", alias="a") == pytest.approx(7000.65)
    assert shown.value("alone") == 0, "a series without labels is there from the start"
    assert shown.value("lag_seconds_count") == 0


def test_the_page_says_what_the_librarys_own_writers_say() -> None:
    counted = Counted()
    counted.fill()
    prometheus_client.Info("about", "another collector's", registry=counted.registry).info({"of": "somebody"})
    assert page_of(counted.registry) == prometheus_client.generate_latest(counted.registry).decode()
    text = b"".join(slices(counted.registry, OPENMETRICS)).decode()
    assert text == openmetrics.generate_latest(counted.registry).decode()  # type: ignore[no-untyped-call]
    names = [family.name for family in openmetrics_families(text)]  # type: ignore[no-untyped-call]
    assert names == ["calls", "level", "took_seconds", "alone", "lag_seconds", "about"]


def test_gauges_forget_what_is_gone() -> None:
    counted = Counted()
    counted.level.replace({"north": 1, "south": 2})
    counted.level.replace({"south": 3})
    shown = counted.shown
    assert shown.value("level", zone="south") == 3
    assert shown.sum("level") == 3


def test_series_that_come_and_go_leave_nothing_behind() -> None:
    counted = Counted()

    def grown(times: int) -> int:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(times):
            counted.level.replace({f"{number} " * 50: 1.0})
            page_of(counted.registry)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        grown(50)
        assert grown(300) < 20_000
    finally:
        tracemalloc.stop()


def test_what_is_misused_is_refused() -> None:
    counted = Counted()
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        Gauge("level", "", registry=counted.registry)
    with pytest.raises(ValueError, match="Incorrect label count"):
        counted.calls.labels("me")
    with pytest.raises(ValueError, match="Incorrect label names"):
        counted.calls.labels(who="me", which="x")
    with pytest.raises(ValueError, match="can't fall"):
        counted.calls.labels("me", "x").inc(-1)


def test_a_metric_has_a_bounded_number_of_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(types, "MAX_SERIES", 3)
    counted = Counted()
    for number in range(10):
        counted.calls.labels(f"caller-{number}", "x").inc()
        counted.took.labels(f"model-{number}", "x").observe(1.0)
    shown = counted.shown
    assert shown.sum("calls_total") == 10
    assert shown.value("calls_total", who="other", how="other") == 7
    assert shown.value("took_seconds_count", model="other", alias="other") == 7
    counted.calls.labels(how="x", who="caller-1").inc()
    assert counted.shown.value("calls_total", who="caller-1", how="x") == 2


def test_counting_goes_on_while_another_thread_writes_the_page() -> None:
    counted = Counted()
    pages: list[bytes] = []
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            pages.append(written_aside(counted.registry, TEXT))

    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        reader = threading.Thread(target=write)
        reader.start()
        for number in range(3000):
            counted.calls.labels(str(number), "x").inc()
            counted.took.labels(str(number % 50), "x").observe(0.5)
        over.set()
        reader.join()
    finally:
        sys.setswitchinterval(switching)
    assert pages
    for page in pages[:3]:
        Scrape(page.decode())
    assert counted.shown.sum("calls_total") == 3000
