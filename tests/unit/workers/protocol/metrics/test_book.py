"""Counting, and what a scrape gets of it."""

from __future__ import annotations

import sys
import threading
import tracemalloc

import pytest

from tests.support.scrape import Scrape
from workers.protocol.metrics import families
from workers.protocol.metrics.book import Book
from workers.protocol.metrics.metric import Kind, Metric

CALLS = Metric("calls_total", Kind.COUNTER, 'a "help" with \\ and\nlines', ("who", "how"))
LEVEL = Metric("level", Kind.GAUGE, "a level", ("zone",))
TOOK = Metric("took_seconds", Kind.HISTOGRAM, "times", ("model", "alias"), buckets=(0.1, 1.0))
ALONE = Metric("alone", Kind.GAUGE, "without labels")
LAG = Metric("lag_seconds", Kind.HISTOGRAM, "without labels", buckets=(0.5,))
ALL = (CALLS, LEVEL, TOOK, ALONE, LAG)


def test_what_is_counted_is_shown() -> None:
    book = Book(ALL)
    calls, level, took = book.counter(CALLS), book.gauge(LEVEL), book.histogram(TOOK)
    book.gauge(ALONE)
    book.histogram(LAG)
    calls.inc("me", 'say "x\\y"\n')
    calls.inc("me", 'say "x\\y"\n', by=2)
    level.set(1.5, "north")
    for value in (0.05, 0.1, 0.5, 7.0):
        took.observe(value, "m", "a")
    shown = Scrape(book.render().decode())
    shown.has_exactly(ALL)
    assert shown.value("calls_total", who="me", how='say "x\\y"\n') == calls.value("me", 'say "x\\y"\n') == 3
    assert shown.value("level", zone="north") == 1.5
    buckets = [shown.value("took_seconds_bucket", model="m", alias="a", le=le) for le in ("0.1", "1.0", "+Inf")]
    assert buckets == [2, 3, 4], "a bucket holds what is not above it"
    assert shown.value("took_seconds_count", model="m", alias="a") == took.count("m", "a") == 4
    assert shown.value("took_seconds_sum", model="m", alias="a") == pytest.approx(7.65)
    assert shown.value("alone") == 0, "a series without labels is there from the start"
    assert shown.value("lag_seconds_count") == 0


def test_gauges_forget_what_is_gone() -> None:
    book = Book(ALL)
    level = book.gauge(LEVEL)
    level.replace({"north": 1, "south": 2})
    level.replace({"south": 3})
    shown = Scrape(book.render().decode())
    assert shown.value("level", zone="south") == 3
    assert shown.sum("level") == 3


def test_series_that_come_and_go_leave_nothing_behind() -> None:
    """As those of an info metric whose labels say which adapters are in use."""
    book = Book(ALL)
    level = book.gauge(LEVEL)

    def grown(times: int) -> int:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(times):
            level.only(1.0, f"{number} " * 50)
            book.render()
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        grown(50)
        assert grown(300) < 20_000
    finally:
        tracemalloc.stop()


def test_what_is_not_declared_can_not_be_counted() -> None:
    book = Book((CALLS, LEVEL))
    with pytest.raises(ValueError, match="took_seconds is not in the catalogue"):
        book.histogram(TOOK)
    with pytest.raises(ValueError, match="level is declared as a gauge, not a counter"):
        book.counter(LEVEL)
    calls = book.counter(CALLS)
    with pytest.raises(ValueError, match="somebody else"):
        book.counter(CALLS)
    with pytest.raises(ValueError, match="has the labels"):
        calls.inc("me")
    assert book.unopened == (LEVEL,)


def test_a_metric_has_a_bounded_number_of_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "MAX_SERIES", 3)
    book = Book(ALL)
    calls, took = book.counter(CALLS), book.histogram(TOOK)
    for number in range(10):
        calls.inc(f"caller-{number}", "x")
        took.observe(1.0, f"model-{number}", "x")
    shown = Scrape(book.render().decode())
    assert shown.sum("calls_total") == 10
    assert shown.value("calls_total", who="other", how="other") == 7
    assert shown.value("took_seconds_count", model="other", alias="other") == 7
    calls.inc("caller-1", "x")
    assert calls.value("caller-1", "x") == 2


def test_counting_goes_on_while_another_thread_renders() -> None:
    book = Book(ALL)
    calls, took = book.counter(CALLS), book.histogram(TOOK)
    pages: list[bytes] = []
    over = threading.Event()

    def render() -> None:
        while not over.is_set():
            pages.append(book.render_aside())

    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        reader = threading.Thread(target=render)
        reader.start()
        for number in range(3000):
            calls.inc(str(number), "x")
            took.observe(0.5, str(number % 50), "x")
        over.set()
        reader.join()
    finally:
        sys.setswitchinterval(switching)
    assert pages
    for page in (*pages[:3], book.render()):
        Scrape(page.decode())
    assert Scrape(book.render().decode()).sum("calls_total") == 3000
