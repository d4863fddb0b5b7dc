"""The tracers, which are given each finished call (a journey). `NoTracer` records nothing. `BackgroundTracer` has a
thread that makes spans of the calls and sends them to the configured endpoint, the collector.

`tell` appends to a queue. If it is full, or if the collector does not take the spans, traces are lost and a log line
says so; no call ever waits or fails because of tracing. Without an endpoint OpenTelemetry's libraries are not loaded
and need not be installed.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from workers.tracing.span import Span, TraceContext, new_context

log = logging.getLogger(__name__)

MAX_WAITING = 4096
"""Maximum number of finished calls that wait to be sent; further ones are lost. Each takes a few kilobytes."""
BATCH = 256
EVERY_S = 5.0
"""Seconds after which finished calls are sent even if they are fewer than `BATCH`; OpenTelemetry's own default."""
RETRY_S = (0.5, 1.0, 2.0)
"""Seconds to wait before each new attempt to send a batch; if the last attempt fails too, the batch is lost."""
CLOSE_S = 1.5
"""Maximum seconds that an ending process waits until the spans of its last calls are sent."""
BREATH_S, BREATH_JOURNEYS = 0.0002, 16
"""The sending thread sleeps for `BREATH_S` seconds after every `BREATH_JOURNEYS` calls, to let the event loop have the
interpreter's lock: the thread needs that lock for 30 ms per batch."""


class Journey(Protocol):
    """A finished call or request, from which spans are made."""

    def spans(self) -> Sequence[Span]:
        """Return the call's spans. Called once, on another thread, when the data of the call no longer changes."""
        ...


class Tracer(Protocol):
    def inside(self, caller: TraceContext | None) -> TraceContext | None:
        """Return the context for the span of a call that begins now; None: no span of the call is recorded.

        `caller`: the span that contains the new one; None: the new span begins a trace. Pass the ended call to `tell`.
        """
        ...

    def tell(self, journey: Journey) -> None:
        """Take a finished call, to be sent later. Never waits and never fails."""
        ...


class NoTracer:
    """A tracer that records nothing."""

    def inside(self, caller: TraceContext | None) -> TraceContext | None:
        return None

    def tell(self, journey: Journey) -> None:
        """Ignore the finished call."""


OFF: Tracer = NoTracer()


class ExportFailed(Exception):
    """The collector did not take the spans."""

    def __init__(self, why: str, *, is_passing: bool) -> None:
        """`is_passing`: whether the fault may pass, so that the collector takes the same spans at a later attempt."""
        super().__init__(why)
        self.is_passing = is_passing


class Exporter(Protocol):
    def export(self, spans: Sequence[Span]) -> None:
        """Send the spans, and block until the collector has taken them. Raises ExportFailed."""
        ...


class BackgroundTracer:
    """Records a share of the traces that begin in this process. Spans are sent by the thread that `running` starts."""

    def __init__(self, exporter: Exporter, share: float = 1.0, every_s: float = EVERY_S) -> None:
        """`share`: fraction of the traces that begin here to record; others are recorded if their caller `is_sampled`.

        `every_s`: seconds after which finished calls are sent even if they are fewer than `BATCH`."""
        self._exporter = exporter
        self._share = share
        self._every_s = every_s
        self._waiting: deque[Journey] = deque()
        self._num_lost = 0
        self._is_failing = False
        self._wake = threading.Event()
        self._closing = threading.Event()

    def inside(self, caller: TraceContext | None) -> TraceContext | None:
        if caller is not None:
            return caller.inside() if caller.is_sampled else None
        # Which traces are recorded is no secret.
        return new_context() if random.random() < self._share else None  # noqa: S311

    def tell(self, journey: Journey) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._num_lost += 1
            return
        self._waiting.append(journey)
        if len(self._waiting) == BATCH:
            self._wake.set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the sending thread within this block. When the block ends, wait at most `CLOSE_S` for the last spans."""
        thread = threading.Thread(target=self._run, name="tracing", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._closing.set()
            self._wake.set()
            thread.join(CLOSE_S)
            if thread.is_alive():
                log.warning("the last traces were not delivered in %g s", CLOSE_S)

    def _run(self) -> None:
        while True:
            self._wake.wait(self._every_s)
            self._wake.clear()
            closing = self._closing.is_set()
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                self._send(batch)
            if closing:
                return

    def _send(self, batch: Sequence[Journey]) -> None:
        try:
            spans: list[Span] = []
            for number, journey in enumerate(batch, 1):
                spans += journey.spans()
                if number % BREATH_JOURNEYS == 0:
                    time.sleep(BREATH_S)
            self._deliver(spans)
        except ExportFailed as failed:
            self._num_lost += len(batch)
            if not self._is_failing:
                log.warning("traces are not delivered: %s; calls go on, and this is said once", failed)
            self._is_failing = True
        except Exception:  # one faulty journey must not end the thread, and with it all tracing
            log.exception("%d traces could not be made", len(batch))
        else:
            if self._num_lost:
                log.warning("traces are delivered again; %d were lost", self._num_lost)
            self._is_failing, self._num_lost = False, 0

    def _deliver(self, spans: Sequence[Span]) -> None:
        for pause_s in RETRY_S:
            try:
                self._exporter.export(spans)
                return
            except ExportFailed as failed:
                # No retries for an error that will not pass, after a batch that failed altogether, or while closing.
                if not failed.is_passing or self._is_failing or self._closing.wait(pause_s):
                    raise
        self._exporter.export(spans)


EXPORTER = "workers.tracing.otlp"
TRACES_PATH = "/v1/traces"

STANDARD_TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
STANDARD_BASE = "OTEL_EXPORTER_OTLP_ENDPOINT"
STANDARD_HEADERS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
STANDARD_NAME, STANDARD_RESOURCE = "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"
STANDARD_OFF = "OTEL_SDK_DISABLED"
STANDARD_EVERY_MS = "OTEL_BSP_SCHEDULE_DELAY"

NOT_INSTALLED = (
    "tracing needs {name}, which is not installed; install the extra 'tracing': pip install '.[tracing]' in Paddock's "
    "checkout, or unset {setting}"
)


class TracingUnusable(ValueError):
    """The tracing that the settings ask for is not possible; the message says why, and the remedy."""


@contextmanager
def tracing(
    endpoint: str,
    headers: str,
    share: float,
    resource: Mapping[str, str],
    version: str,
    environment: Mapping[str, str],
) -> Iterator[Tracer]:
    """Yield a running tracer, or `OFF` if no endpoint is configured. Raises TracingUnusable.

    `resource`: attributes of this process; those in the environment take precedence."""
    url, setting = _endpoint(endpoint, environment)
    exporter = _exporter(url, setting, headers, resource, version, environment) if url else None
    if exporter is None:
        yield OFF
        return
    tracer = BackgroundTracer(exporter, share, _every_s(environment))
    log.info("traces go to %s", url)
    with tracer.running():
        yield tracer


def _exporter(
    url: str, setting: str, headers: str, resource: Mapping[str, str], version: str, environment: Mapping[str, str]
) -> Any:
    """Return the exporter; None: its library is missing, and the endpoint comes only from a standard OTEL_ variable."""
    _check(url, setting)
    told = headers or next((environment[name] for name in STANDARD_HEADERS if environment.get(name)), "")
    given = _pairs("otlp_headers", told)
    try:
        exporter = import_module(EXPORTER).OtlpExporter
    except ModuleNotFoundError as error:
        why = NOT_INSTALLED.format(name=error.name, setting=setting)
        if setting.startswith("OTEL_"):
            # Such a variable may be set for all programs of a cluster, so it is no reason to fail.
            log.warning(why)
            return None
        raise TracingUnusable(why) from None
    return exporter(url, given, _resource(resource, environment), version)


def _endpoint(endpoint: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the collector's complete URL, and the name of the setting that gives it; both empty: tracing is off."""
    if environment.get(STANDARD_OFF, "").lower() == "true":
        return "", ""
    if endpoint:
        return _with_path(endpoint), "otlp_endpoint"
    if whole := environment.get(STANDARD_TRACES):
        return whole, STANDARD_TRACES
    base = environment.get(STANDARD_BASE, "")
    return (_with_path(base), STANDARD_BASE) if base else ("", "")


def _with_path(url: str) -> str:
    url = url.rstrip("/")
    return url if url.endswith(TRACES_PATH) else url + TRACES_PATH


def _check(url: str, setting: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise TracingUnusable(
            f"{setting}: {url} is no URL of a collector; give one that speaks OTLP over HTTP, such as "
            "http://127.0.0.1:4318"
        )
    if parts.username is not None or parts.password is not None:
        raise TracingUnusable(f"{setting}: the URL must not have a password in it; say it with otlp_headers")


def _every_s(environment: Mapping[str, str]) -> float:
    told = environment.get(STANDARD_EVERY_MS, "")
    return max(0.01, int(told) / 1e3) if told.isdecimal() else EVERY_S


def _pairs(setting: str, text: str) -> dict[str, str]:
    """Parse `name=value,name=value`, percent-encoded, as in OpenTelemetry's own variables. Raises TracingUnusable."""
    pairs = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise TracingUnusable(f"{setting}: must be name=value pairs with commas between them")
        pairs[unquote(name.strip())] = unquote(value.strip())
    return pairs


def _resource(own: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    named = {"service.name": environment[STANDARD_NAME]} if environment.get(STANDARD_NAME) else {}
    return {**own, **_pairs(STANDARD_RESOURCE, environment.get(STANDARD_RESOURCE, "")), **named}
