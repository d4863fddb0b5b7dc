"""What goes to a collector, and what does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from workers.tracing.otlp import KEPT_CHARS, MAX_TEXT_CHARS, OtlpExporter
from workers.tracing.span import Kind, Span, TraceContext, Value
from workers.tracing.tracer import ExportFailed


def span(**attributes: Value) -> Span:
    now = time.monotonic()
    return Span("GET", TraceContext("a" * 32, "b" * 16), "", now, now, Kind.SERVER, attributes)


def test_what_callers_write_is_cut_and_not_kept() -> None:
    exporter = OtlpExporter("http://127.0.0.1:9/v1/traces", {}, {}, "0")
    for number in range(100):
        path = f"/{number}-" + "x" * 100_000
        assert len(exporter.encoded([span(**{"url.path": path, "http.request.method": "GET"})])) < MAX_TEXT_CHARS + 500
    kept = exporter._kept.cache_info()
    assert kept.currsize == 1, "what repeats is"
    exporter.encoded([span(model="m" * KEPT_CHARS)])
    assert exporter._kept.cache_info().currsize == 2


@pytest.fixture
def moved() -> Iterator[tuple[str, list[str]]]:
    """A collector that answers every POST by another address, and what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append("POST")
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(302)
            self.send_header("location", "/elsewhere")
            self.send_header("content-length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            asked.append("GET")
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", asked
        server.shutdown()


def test_a_collector_that_has_moved_is_an_error(moved: tuple[str, list[str]]) -> None:
    """Followed, the request would lose its body, and its headers' secrets would go to whoever is there."""
    url, asked = moved
    with pytest.raises(ExportFailed, match="answered HTTP 302") as failed:
        OtlpExporter(url, {"authorization": "Bearer secret"}, {}, "0").export([span(model="m")])
    assert not failed.value.is_passing
    assert asked == ["POST"]
