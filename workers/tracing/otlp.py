"""Spans over OTLP/HTTP, as protobuf. The only importer of OpenTelemetry's libraries (extra `tracing`).

Messages are filled in here, with the attributes that repeat kept ready: OpenTelemetry's own encoder takes 130
microseconds of CPU for a span with twelve attributes, this 35 (`benchmarks/tracing_cost.py`), and a gateway makes three
spans per call on the core that streams tokens.
Sources: opentelemetry-proto, OTLP specification 1.9 (which failures may be tried again).
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import lru_cache
from http.client import HTTPException
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from workers.tracing.context import TraceContext
from workers.tracing.span import Attributes, Span, Value, WallClock
from workers.tracing.tracer import BREATH_S, ExportFailed

TIMEOUT_S = 5.0
PASSING_STATUS = frozenset({429, 502, 503, 504})
MAX_TEXT_CHARS = 512
KEPT_ATTRIBUTES = 4096
SCOPE = "paddock"
BREATH_SPANS = 8
"""After so many the event loop gets the interpreter lock; see `workers.tracing.tracer.BREATH_S`."""


class OtlpExporter:
    """Sends to one collector. For one thread."""

    def __init__(self, endpoint: str, headers: Mapping[str, str], resource: Mapping[str, str], version: str) -> None:
        """`endpoint`: the whole URL; `resource`: what all spans of this process have in common."""
        self._endpoint = endpoint
        self._headers = {"Content-Type": "application/x-protobuf", "User-Agent": f"paddock/{version}", **headers}
        self._version = version
        self._label = lru_cache(KEPT_ATTRIBUTES)(_text_attribute)
        self._resource = [self._label(name, value) for name, value in resource.items()]
        self._clock = WallClock()

    def export(self, spans: Sequence[Span]) -> None:
        """Raises ExportFailed."""
        request = urllib.request.Request(self._endpoint, self.encoded(spans), self._headers)  # noqa: S310 - http(s) only
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                answer.read()
        except urllib.error.HTTPError as error:
            error.close()
            raise ExportFailed(
                f"{self._endpoint} answered HTTP {error.code}", is_passing=error.code in PASSING_STATUS
            ) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", None) or error or type(error).__name__
            raise ExportFailed(f"{self._endpoint}: {reason}", is_passing=True) from None

    def encoded(self, spans: Sequence[Span]) -> bytes:
        """The body of a request."""
        self._clock = WallClock()
        request = ExportTraceServiceRequest()
        group = request.resource_spans.add()
        group.resource.attributes.extend(self._resource)
        scoped = group.scope_spans.add()
        scoped.scope.name, scoped.scope.version = SCOPE, self._version
        for number, span in enumerate(spans, 1):
            self._fill(scoped.spans.add(), span)
            if number % BREATH_SPANS == 0:
                time.sleep(BREATH_S)
        return bytes(request.SerializeToString())

    def _fill(self, message: SpanMessage, span: Span) -> None:
        unix_ns = self._clock.unix_ns
        message.trace_id, message.span_id = _ids(span.context)
        if span.parent_id:
            message.parent_span_id = bytes.fromhex(span.parent_id)
        if span.context.state:
            message.trace_state = span.context.state
        message.name, message.kind = span.name, int(span.kind)  # type: ignore[assignment]
        message.start_time_unix_nano = unix_ns(span.began_at)
        message.end_time_unix_nano = max(unix_ns(span.ended_at), message.start_time_unix_nano)
        self._add(message.attributes, span.attributes)
        if span.error:
            message.status.code, message.status.message = Status.STATUS_CODE_ERROR, span.error
        for event in span.events:
            told = message.events.add()
            told.name, told.time_unix_nano = event.name, unix_ns(event.at)
            self._add(told.attributes, event.attributes)
        for context in span.links:
            link = message.links.add()
            link.trace_id, link.span_id = _ids(context)

    def _add(self, told: Any, attributes: Attributes) -> None:
        """`told`: a message's repeated field of attributes."""
        told.extend(
            [self._label(name, value) for name, value in attributes.items() if isinstance(value, str) and value]
        )
        for name, value in attributes.items():
            if not isinstance(value, str):
                one = told.add()
                one.key = name
                _set(one.value, value)


def _ids(context: TraceContext) -> tuple[bytes, bytes]:
    return bytes.fromhex(context.trace_id), bytes.fromhex(context.span_id)


def _set(told: AnyValue, value: Value) -> None:
    match value:
        case bool():
            told.bool_value = value
        case int():
            told.int_value = value
        case float():
            told.double_value = value
        case str():
            told.string_value = _bounded(value)
        case _:
            told.array_value.values.extend([AnyValue(string_value=_bounded(text)) for text in value])


def _text_attribute(name: str, value: str) -> KeyValue:
    return KeyValue(key=name, value=AnyValue(string_value=_bounded(value)))


def _bounded(text: str) -> str:
    """What callers choose (names of models, paths) may be long, and half a character."""
    return text[:MAX_TEXT_CHARS].encode("utf-8", "replace").decode()
