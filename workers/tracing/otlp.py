"""Exports spans over OTLP/HTTP, as protobuf. The only importer of OpenTelemetry's libraries (extra `tracing`).

The common fields of a span are encoded here, and its encoded attributes are cached, since most of them repeat. So a
span of Paddock's takes 12 microseconds of CPU, and 85 with OpenTelemetry's encoder. A gateway makes three spans per
call, on the core that streams tokens (docs/performance.md). Rare fields are encoded by the libraries' message classes:
protobuf allows parts of a message to be encoded separately and joined.
Sources: opentelemetry-proto (trace/v1/trace.proto), OTLP specification 1.9 (which failures can be retried).
"""

from __future__ import annotations

import struct
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import lru_cache
from http.client import HTTPException

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Status
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

from workers.tracing.span import Span, TraceContext, Value, WallClock
from workers.tracing.tracer import BREATH_S, ExportFailed

TIMEOUT_S = 5.0
PASSING_STATUS = frozenset({429, 502, 503, 504})
MAX_TEXT_CHARS = 512
KEPT_ATTRIBUTES = 16_384
KEPT_CHARS = 64
"""Maximum length of a text whose encoded attribute is cached. Longer texts are mostly callers' own, such as an unknown
path, and would fill the cache."""
KEPT_INT = 1 << 16
"""Integers below this repeat often enough for their encoded attributes to be cached."""
SCOPE = "paddock"
BREATH_SPANS = 24
"""Number of encoded spans after which the thread sleeps for `BREATH_S` (`workers.tracing.tracer`) to let others run."""

# Tags of protobuf fields: the field's number and its wire type.
TRACE_ID, SPAN_ID, PARENT_ID = b"\x0a\x10", b"\x12\x08", b"\x22\x08"  # with the length, which is always the same
NAME, ATTRIBUTE, KIND = b"\x2a", b"\x4a", b"\x30"
TIMES = struct.Struct("<cQcQ")
BEGAN, ENDED = b"\x39", b"\x41"
RESOURCE_SPANS, SCOPE_SPANS, SPAN = b"\x0a", b"\x12", b"\x12"  # nested: a request has the first, which has the second


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Treats a redirect as an error. If it were followed, a GET in place of the POST would take the secrets in the
    headers to another host, whose answer would count as success."""

    def redirect_request(self, *_: object) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirects)


class OtlpExporter:
    """Sends spans to one collector. To be used by one thread only."""

    def __init__(self, endpoint: str, headers: Mapping[str, str], resource: Mapping[str, str], version: str) -> None:
        """`endpoint`: the complete URL. `resource`: attributes that all spans of this process have."""
        self._endpoint = endpoint
        self._headers = {"Content-Type": "application/x-protobuf", "User-Agent": f"paddock/{version}", **headers}
        self._kept = lru_cache(KEPT_ATTRIBUTES, typed=True)(_attribute)
        self._head = lru_cache(KEPT_ATTRIBUTES)(_head)
        told = ResourceSpans()
        told.resource.attributes.extend([_key_value(name, value) for name, value in resource.items()])
        self._resource = bytes(told.SerializeToString())
        scoped = ScopeSpans()
        scoped.scope.name, scoped.scope.version = SCOPE, version
        self._scope = bytes(scoped.SerializeToString())

    def export(self, spans: Sequence[Span]) -> None:
        """Send spans and wait for the answer. Raises ExportFailed."""
        request = urllib.request.Request(self._endpoint, self.encoded(spans), self._headers)  # noqa: S310 - http(s) only
        try:
            with _opener.open(request, timeout=TIMEOUT_S) as answer:
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
        """Return the body of a request: an `ExportTraceServiceRequest`."""
        clock = WallClock()
        parts = [self._scope]
        for number, span in enumerate(spans, 1):
            parts.append(_field(SPAN, self._span(span, clock)))
            if number % BREATH_SPANS == 0:
                time.sleep(BREATH_S)
        return _field(RESOURCE_SPANS, self._resource + _field(SCOPE_SPANS, b"".join(parts)))

    def _span(self, span: Span, clock: WallClock) -> bytes:
        began_ns = clock.unix_ns(span.began_at)
        trace_id, span_id = _ids(span.context)
        parts = [
            TRACE_ID,
            trace_id,
            SPAN_ID,
            span_id,
            self._head(_bounded(span.name), int(span.kind)),
            TIMES.pack(BEGAN, began_ns, ENDED, max(began_ns, clock.unix_ns(span.ended_at))),
        ]
        if span.parent_id:
            parts += (PARENT_ID, bytes.fromhex(span.parent_id))
        for name, value in span.attributes.items():
            if value == "":
                continue
            parts.append(self._kept(name, value) if _repeats(value) else _attribute(name, value))
        if span.error or span.events or span.links or span.context.state:
            parts.append(_rest(span, clock))
        return b"".join(parts)


def _repeats(value: Value) -> bool:
    """Return whether a value is small and likely to come again, so that caching its encoded attribute pays off."""
    if type(value) is str:
        return len(value) <= KEPT_CHARS
    return type(value) is bool or (type(value) is int and value < KEPT_INT)


def _rest(span: Span, clock: WallClock) -> bytes:
    """Encode the fields that few spans have: state, error, events, links."""
    message = SpanMessage(trace_state=span.context.state)
    if span.error:
        message.status.code, message.status.message = Status.STATUS_CODE_ERROR, span.error
    for event in span.events:
        told = message.events.add()
        told.name, told.time_unix_nano = event.name, clock.unix_ns(event.at)
        told.attributes.extend([_key_value(name, value) for name, value in event.attributes.items()])
    for context in span.links:
        link = message.links.add()
        link.trace_id, link.span_id = _ids(context)
    return bytes(message.SerializeToString())


def _ids(context: TraceContext) -> tuple[bytes, bytes]:
    return bytes.fromhex(context.trace_id), bytes.fromhex(context.span_id)


def _head(name: str, kind: int) -> bytes:
    return _field(NAME, name.encode()) + KIND + bytes((kind,))


def _attribute(name: str, value: Value) -> bytes:
    """Encode an attribute as a field of a span."""
    return _field(ATTRIBUTE, bytes(_key_value(name, value).SerializeToString()))


def _key_value(name: str, value: Value) -> KeyValue:
    match value:
        case bool():
            told = AnyValue(bool_value=value)
        case int():
            told = AnyValue(int_value=value)
        case float():
            told = AnyValue(double_value=value)
        case str():
            told = AnyValue(string_value=_bounded(value))
        case _:
            texts = [AnyValue(string_value=_bounded(text)) for text in value]
            told = AnyValue(array_value=ArrayValue(values=texts))
    return KeyValue(key=name, value=told)


def _field(tag: bytes, body: bytes) -> bytes:
    """Encode a protobuf field: tag, length as a varint (seven bits per byte, the lowest first), body."""
    length, more = len(body), bytearray()
    while length > 0x7F:
        more.append(length & 0x7F | 0x80)
        length >>= 7
    more.append(length)
    return tag + more + body


def _bounded(text: str) -> str:
    """Return a text cut to `MAX_TEXT_CHARS` and valid in UTF-8: callers' texts (model names, paths) may be neither."""
    return text[:MAX_TEXT_CHARS].encode("utf-8", "replace").decode()
