"""The thread that sends traces: what is sampled, what is lost and said, what a stop waits for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import pytest

from workers.tracing.span import Span, TraceContext, new_context
from workers.tracing.tracer import CLOSE_S, MAX_WAITING, OFF, BackgroundTracer, ExportFailed


class Journey:
    def __init__(self, name: str = "one") -> None:
        self._name = name

    def spans(self) -> Sequence[Span]:
        return [Span(self._name, new_context(), "", 1.0, 2.0)]


class Broken:
    def spans(self) -> Sequence[Span]:
        raise ZeroDivisionError


class Collector:
    """Takes spans, or fails as it is told."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.failures: list[ExportFailed] = []
        self.num_asked = 0
        self.held = threading.Event()
        self.held.set()

    def export(self, spans: Sequence[Span]) -> None:
        self.num_asked += 1
        self.held.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.names += [span.name for span in spans]


def test_who_comes_with_a_trace_has_decided() -> None:
    none, every = BackgroundTracer(Collector(), 0.0), BackgroundTracer(Collector(), 1.0)
    wanted, unwanted = new_context(), TraceContext("1" * 32, "2" * 16, is_sampled=False)
    assert none.inside(None) is None
    assert every.inside(unwanted) is None
    for tracer in (none, every):
        inside = tracer.inside(wanted)
        assert inside is not None
        assert inside.trace_id == wanted.trace_id
        assert inside.span_id != wanted.span_id
    begun = every.inside(None)
    assert begun is not None
    assert begun.is_sampled
    assert OFF.inside(wanted) is None


def test_a_share_of_what_begins() -> None:
    tracer = BackgroundTracer(Collector(), 0.25)
    count = sum(tracer.inside(None) is not None for _ in range(4000))
    assert 850 < count < 1150


def test_what_is_told_leaves_soon_and_in_order() -> None:
    collector = Collector()
    tracer = BackgroundTracer(collector, every_s=0.01)
    with tracer.running():
        for number in range(20):
            tracer.tell(Journey(str(number)))
        until(lambda: len(collector.names) == 20)
    assert collector.names == [str(number) for number in range(20)]


def test_a_stop_sends_what_is_left() -> None:
    collector = Collector()
    tracer = BackgroundTracer(collector, every_s=60.0)
    with tracer.running():
        tracer.tell(Journey())
    assert collector.names == ["one"]


def test_a_stop_waits_for_no_collector_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector()
    collector.held.clear()
    tracer = BackgroundTracer(collector)
    began = time.monotonic()
    with tracer.running():
        tracer.tell(Journey())
    assert CLOSE_S <= time.monotonic() - began < CLOSE_S + 1.0
    assert "not delivered" in caplog.text
    collector.held.set()


def test_what_fails_in_passing_is_sent_again() -> None:
    collector = Collector()
    collector.failures = [ExportFailed("busy", is_passing=True)]
    tracer = BackgroundTracer(collector, every_s=0.01)
    with tracer.running():
        tracer.tell(Journey())
        until(lambda: bool(collector.names))
    assert collector.num_asked == 2


def test_a_failure_is_said_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector()
    collector.failures = [ExportFailed("no such route", is_passing=False) for _ in range(3)]
    tracer = BackgroundTracer(collector, every_s=0.01)
    caplog.set_level(logging.INFO)
    with tracer.running():
        for number in range(4):
            tracer.tell(Journey())
            until(lambda count=number: collector.num_asked > count)
        until(lambda: bool(collector.names))
    told = [record.getMessage() for record in caplog.records]
    assert [line for line in told if "no such route" in line] == [told[0]]
    assert told[1:] == ["traces are delivered again; 3 were lost"]


def test_a_journey_that_cannot_be_told_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector()
    tracer = BackgroundTracer(collector, every_s=0.01)
    with tracer.running():
        tracer.tell(Broken())
        until(lambda: "could not be made" in caplog.text)
        tracer.tell(Journey())
        until(lambda: bool(collector.names))


@pytest.mark.serial
def test_a_full_queue_loses_what_comes_and_says_how_much(caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector()
    tracer = BackgroundTracer(collector)
    began = time.perf_counter()
    for _ in range(MAX_WAITING + 7):
        tracer.tell(Journey())
    assert (time.perf_counter() - began) / MAX_WAITING < 50e-6
    with tracer.running():
        until(lambda: len(collector.names) == MAX_WAITING)
    assert "7 were lost" in caplog.text


def until(condition: object, timeout_s: float = 5.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
