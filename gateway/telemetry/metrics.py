"""Every metric of the gateway, declared once; what each says is told in docs/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.telemetry.trail import Trail

# As in vLLM's `time_to_first_token_seconds` and `e2e_request_latency_seconds`, so that quantiles compare.
TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
E2E_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
OVERHEAD_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """One set of metrics with its own registry; updated once per request, never per token."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        who = ("model", "alias", "team")
        self.requests = Counter("paddock_requests", "Requests that ended", (*who, "outcome"), registry=registry)
        self.in_flight = Gauge("paddock_requests_in_flight", "Requests under way", ("model",), registry=registry)
        self.ttft = Histogram(
            "paddock_ttft_seconds",
            "Arrival to first token",
            ("model", "alias"),
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.e2e = Histogram(
            "paddock_e2e_seconds",
            "Arrival to end",
            ("model", "alias", "outcome"),
            buckets=E2E_BUCKETS_S,
            registry=registry,
        )
        self._add_line(registry)
        self.overhead = Histogram(
            "paddock_overhead_seconds",
            "Gateway's own time before the worker is asked",
            ("model",),
            buckets=OVERHEAD_BUCKETS_S,
            registry=registry,
        )
        self.prompt_tokens = Counter("paddock_prompt_tokens", "Prompt tokens", who, registry=registry)
        self.cached_tokens = Counter(
            "paddock_cached_tokens", "Prompt tokens found in a KV cache", who, registry=registry
        )
        self.generated_tokens = Counter("paddock_generated_tokens", "Generated tokens", who, registry=registry)
        self._add_tries(registry)
        self.queue_length = Gauge("paddock_queue_length", "Calls that wait for a slot", ("model",), registry=registry)
        self.workers = Gauge("paddock_workers", "Live workers", ("model",), registry=registry)

    def _add_line(self, registry: CollectorRegistry) -> None:
        """Waiting for a slot, and getting one."""
        self.queue_wait = Histogram(
            "paddock_queue_wait_seconds", "Waiting for a slot", ("model",), buckets=TTFT_BUCKETS_S, registry=registry
        )
        self.wait_error = Histogram(
            "paddock_wait_error_seconds",
            "How far the predicted wait for a slot was off",
            ("model",),
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.placements = Counter("paddock_placements", "Requests that got a slot", ("model", "how"), registry=registry)
        self.overtaken = Counter(
            "paddock_overtaken",
            "Slots that went past a request that wanted them",
            ("model",),
            registry=registry,
        )

    def _add_tries(self, registry: CollectorRegistry) -> None:
        """Workers and models that a call goes through until its first token."""
        self.attempts = Counter("paddock_attempts", "Submissions to workers", ("model", "outcome"), registry=registry)
        self.retries = Counter(
            "paddock_retries",
            "Calls that failed before their first token and could be tried again",
            ("model", "outcome"),
            registry=registry,
        )
        self.fallbacks = Counter(
            "paddock_fallbacks",
            "Calls that went on to another model of their chain",
            ("model", "fallback", "reason"),
            registry=registry,
        )
        self.circuits_opened = Counter(
            "paddock_circuits_opened", "Times that a worker was left alone", ("model",), registry=registry
        )
        self.circuits = Gauge("paddock_circuits", "Workers that are left alone now", ("model",), registry=registry)

    def ended(self, trail: Trail, total_s: float) -> None:
        """Count one request that reached a model."""
        who = (trail.model, trail.alias, trail.team)
        self.requests.labels(*who, trail.outcome).inc()
        self.e2e.labels(trail.model, trail.alias, trail.outcome).observe(total_s)
        if trail.attempts:
            self.queue_wait.labels(trail.model).observe(trail.queue_ms / 1e3)
            self.overhead.labels(trail.model).observe(trail.overhead_ms / 1e3)
            self._placed(trail)
        if trail.ttft_s is not None:
            self.ttft.labels(trail.model, trail.alias).observe(trail.ttft_s)
        if trail.usage is not None:
            self.prompt_tokens.labels(*who).inc(trail.usage.prompt_tokens)
            self.cached_tokens.labels(*who).inc(trail.usage.cached_tokens)
            self.generated_tokens.labels(*who).inc(trail.usage.completion_tokens)

    def _placed(self, trail: Trail) -> None:
        if trail.expected_cached is not None:
            self.placements.labels(trail.model, "cached" if trail.expected_cached else "uncached").inc()
        if trail.overtaken:
            self.overtaken.labels(trail.model).inc(trail.overtaken)
        if trail.standing.filed and trail.attempts == 1:
            self.wait_error.labels(trail.model).observe(abs(trail.queue_ms / 1e3 - trail.standing.predicted_s))

    def turned_away(self, trail: Trail) -> None:
        """Count one request that ended before it had a model: its labels `model` and `alias` are empty."""
        self.requests.labels("", "", trail.team, trail.outcome).inc()

    def exposition(
        self, workers: Mapping[str, int], waiting: Mapping[str, int], left_alone: Mapping[str, int]
    ) -> bytes:
        """The text for a scrape. Counts per model, at this moment: `workers`, those of them that are `left_alone`, and
        calls `waiting`.
        """
        counted = ((self.workers, workers), (self.queue_length, waiting), (self.circuits, left_alone))
        for gauge, counts in counted:
            gauge.clear()
            for model, count in counts.items():
                gauge.labels(model).set(count)
        return generate_latest(self._registry)
