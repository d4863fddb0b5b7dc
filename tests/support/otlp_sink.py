"""A collector of traces for one test: takes OTLP over HTTP, as protobuf, and remembers the spans.

python -m tests.support.otlp_sink       prints its URL, and counts until it is ended: for benchmarks
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class Received:
    """One span as it was sent; ids are hexadecimal, times Unix nanoseconds."""

    name: str
    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    kind: int
    began_ns: int
    ended_ns: int
    attributes: Mapping[str, Any]
    error: str | None
    """Message of a status that says that it failed; None: it did not."""
    events: tuple[tuple[str, Mapping[str, Any]], ...]
    links: tuple[str, ...]
    """Trace ids."""

    @property
    def ms(self) -> float:
        return (self.ended_ns - self.began_ns) / 1e6


class OtlpSink:
    """Listens on loopback while it is entered. `status`: what it answers; `pause_s`: how long it thinks before that."""

    def __init__(self, *, keeps: bool = True) -> None:
        self.spans: list[Received] = []
        self.num_spans = 0
        self.num_posts = 0
        self.headers: list[Mapping[str, str]] = []
        self.status = 200
        self.pause_s = 0.0
        self._keeps = keeps
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                time.sleep(sink.pause_s)
                sink._take(self.path, dict(self.headers.items()), body)
                self.send_response(sink.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> OtlpSink:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]

    def of_trace(self, trace_id: str) -> list[Received]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def wait_for(self, trace_id: str, *names: str, timeout_s: float = 10.0) -> list[Received]:
        """The spans of a trace once it has all these. Raises AssertionError."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = self.of_trace(trace_id)
            if all(sum(span.name == name for span in found) >= names.count(name) for name in names):
                return found
            time.sleep(0.01)
        raise AssertionError(f"not within {timeout_s} s: {names}; there are {[one.name for one in self.spans]}")

    def _take(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        assert path == "/v1/traces", path
        assert headers["Content-Type"] == "application/x-protobuf"
        request = ExportTraceServiceRequest.FromString(body)
        self.num_posts += 1
        self.headers.append(headers)
        if self.status != 200:
            return
        for group in request.resource_spans:
            resource = _told(group.resource.attributes)
            for scoped in group.scope_spans:
                self.num_spans += len(scoped.spans)
                if self._keeps:
                    self.spans += [_received(span, resource) for span in scoped.spans]


def _received(span: Any, resource: Mapping[str, Any]) -> Received:
    return Received(
        span.name,
        resource.get("service.name", ""),
        resource.get("service.instance.id", ""),
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.trace_state,
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _told(span.attributes),
        span.status.message if span.status.code == 2 else None,
        tuple((event.name, _told(event.attributes)) for event in span.events),
        tuple(link.trace_id.hex() for link in span.links),
    )


def _told(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(_value(one) for one in value.array_value.values)
    return getattr(value, kind)


def main() -> int:
    with OtlpSink(keeps=False) as sink:
        print(sink.url, flush=True)
        threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
