"""Which tracer there is, by the settings and by OpenTelemetry's own variables; and what is loaded for it."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.otlp_sink import OtlpSink
from workers.tracing import tracer as tracer_module
from workers.tracing.span import Kind, Span, SpanEvent, Value, new_context
from workers.tracing.tracer import OFF, TracingUnusable, tracing

RESOURCE = {"service.name": "paddock-test", "service.instance.id": "one"}


class Told:
    """A journey of one span."""

    def __init__(self, span: Span) -> None:
        self.span = span

    def spans(self) -> list[Span]:
        return [self.span]


def sent(
    sink: OtlpSink, environment: Mapping[str, str], endpoint: str = "", headers: str = "", span: Span | None = None
) -> None:
    """Sends one span as these settings have it."""
    with tracing(endpoint, headers, 1.0, RESOURCE, "1.2", environment) as tracer:
        assert tracer is not OFF
        tracer.tell(Told(span or Span("work", new_context(), "", 1.0, 2.0)))


@pytest.fixture
def sink() -> Any:
    with OtlpSink() as running:
        yield running


@pytest.mark.parametrize("environment", [{}, {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}])
def test_without_an_endpoint_there_is_none(environment: dict[str, str]) -> None:
    with tracing("", "", 1.0, RESOURCE, "1.2", environment) as tracer:
        assert tracer is OFF


def test_without_an_endpoint_nothing_is_loaded() -> None:
    program = (
        "import sys, gateway.lifecycle, workers.service.server\n"
        "from workers.tracing.tracer import tracing\n"
        "with tracing('', '', 1.0, {}, '', {}): pass\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.proto', 'google.protobuf'))])"
    )
    # redis-py loads OpenTelemetry's SDK for itself where that is installed.
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_a_setting_goes_before_the_standard_s_variables(sink: OtlpSink) -> None:
    sent(sink, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, sink.url)
    assert len(sink.named("work")) == 1
    assert sink.spans[0].service == "paddock-test"


def test_the_standard_s_variables_are_heard(sink: OtlpSink) -> None:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": sink.url + "/",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-token=a%20b,x-other=c",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test,service.instance.id=two",
        "OTEL_SERVICE_NAME": "llm",
    }
    sent(sink, environment)
    assert (sink.spans[0].service, sink.spans[0].instance) == ("llm", "two")
    headers = {name.lower(): value for name, value in sink.headers[0].items()}
    assert (headers["x-token"], headers["x-other"]) == ("a b", "c")
    sent(sink, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": sink.url + "/v1/traces"}, headers="x-token=ours")
    assert {name.lower(): value for name, value in sink.headers[1].items()}["x-token"] == "ours"


@pytest.mark.parametrize(
    ("endpoint", "headers", "named"),
    [
        ("collector:4318", "", "otlp_endpoint: collector:4318/v1/traces is no URL"),
        ("grpc://collector:4317", "", "is no URL of a collector"),
        ("http://user:secret@collector", "", "say it with otlp_headers"),
        ("http://collector:4318", "no-equals-sign", "otlp_headers: must be name=value pairs"),
    ],
)
def test_what_cannot_be_is_said_at_the_start(endpoint: str, headers: str, named: str) -> None:
    with pytest.raises(TracingUnusable, match=named) as raised, tracing(endpoint, headers, 1.0, {}, "", {}):
        pass
    assert "secret" not in str(raised.value)
    assert "no-equals-sign" not in str(raised.value)


def test_a_missing_library_is_an_error_for_who_asked_and_a_line_for_who_may_not_have(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracer_module, "EXPORTER", "workers.tracing.is_not_there")
    with pytest.raises(TracingUnusable, match=r"install the extra 'tracing'"), tracing("http://c", "", 1.0, {}, "", {}):
        pass
    with tracing("", "", 1.0, {}, "", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}) as tracer:
        assert tracer is OFF
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in caplog.text


def test_a_collector_that_is_down_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with tracing("http://127.0.0.1:9", "", 1.0, {}, "", {}) as tracer:
        tracer.tell(Told(Span("work", new_context(), "", 1.0, 2.0)))
    assert "traces are not delivered: http://127.0.0.1:9/v1/traces" in caplog.text


def test_a_span_arrives_whole(sink: OtlpSink) -> None:
    context = new_context()
    link = new_context()
    told: dict[str, Value] = {
        "text": "a",
        "half": "\ud800",
        "long": "x" * 9000,
        "none": "",
        "yes": True,
        "number": 7,
        "part": 0.5,
    }
    span = Span(
        "work",
        context,
        "1" * 16,
        10.0,
        12.5,
        Kind.CLIENT,
        {**told, "many": ("a", "b")},
        "broke",
        (SpanEvent("fallback", 11.0, {"model": "b"}),),
        (link,),
    )
    sent(sink, {}, sink.url, span=span)
    (got,) = sink.spans
    assert (got.name, got.trace_id, got.span_id, got.parent_id) == ("work", context.trace_id, context.span_id, "1" * 16)
    assert (got.kind, got.ms, got.error) == (3, 2500.0, "broke")
    assert got.attributes == {
        "text": "a", "half": "?", "long": "x" * 512, "yes": True, "number": 7, "part": 0.5, "many": ("a", "b"),
    }  # fmt: skip
    assert got.events == (("fallback", {"model": "b"}),)
    assert got.links == (link.trace_id,)
