"""What `GET /metrics` of a worker shows: llama-server's and vLLM's names, so that existing boards and scalers work.

This is what is known of calls; of the engine: `workers.service.engine_metrics`.

Counts per token are plain integers here and become samples when somebody scrapes. Sources: tools/server/README.md of
llama.cpp; vLLM's metrics reference (the histograms keep its buckets, so that quantiles compare).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workers.engine.counters import EngineCounters
from workers.engine.request import EngineLoad
from workers.protocol.events import Finished, FinishReason, Started
from workers.service.engine_metrics import EngineMetrics

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
E2E_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20),
    *(30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),
)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

FORM_OUTCOMES = ("compiled", "reused", "refused")

PACE_S = 30.0
"""A finished call weighs half in the present pace after this long."""


class Pace:
    """Tokens per second of the calls that finished lately."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._at = 0.0

    def note(self, num_tokens: int, seconds: float, now: float) -> None:
        weight = 0.5 ** ((now - self._at) / PACE_S)
        self._tokens = self._tokens * weight + num_tokens
        self._seconds = self._seconds * weight + seconds
        self._at = now

    @property
    def per_second(self) -> float:
        """0 before the first call."""
        return self._tokens / self._seconds if self._seconds else 0.0


class WorkerMetrics(Collector):
    """One worker's metrics in a registry of their own."""

    def __init__(
        self,
        model: str,
        load: Callable[[], EngineLoad],
        counters: Callable[[], EngineCounters] = EngineCounters,
        forms: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`forms`: what became of the forms that answers were to be kept to, as `FORM_OUTCOMES`."""
        self.prompt_tokens = 0
        self.computed_prompt_tokens = 0
        self.predicted_tokens = 0
        self._prompt_ms = 0.0
        self._predicted_ms = 0.0
        self._forms = forms
        self._longest = 0
        self._prompt_pace, self._predicted_pace = Pace(), Pace()
        self._model = model
        self._registry = CollectorRegistry()
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From submit to the first token.", TTFT_BUCKETS_S
        )
        self._queue_time = self._histogram("vllm:request_queue_time_seconds", "From submit to a slot.", E2E_BUCKETS_S)
        self._prefill_time = self._histogram(
            "vllm:request_prefill_time_seconds", "Computing the prompt.", E2E_BUCKETS_S
        )
        self._decode_time = self._histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", E2E_BUCKETS_S
        )
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "From submit to the last token.", E2E_BUCKETS_S)
        self._request_prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a finished request.", TOKEN_BUCKETS
        )
        self._request_generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Tokens generated for a finished request.", TOKEN_BUCKETS
        )
        self._success = Counter(
            "vllm:request_success",
            "Requests that ended as they should.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._registry.register(self)
        self._registry.register(EngineMetrics(model, load, counters))

    def started(self, event: Started, queue_s: float) -> None:
        self.prompt_tokens += event.num_prompt_tokens
        self.computed_prompt_tokens += event.num_prompt_tokens - event.num_cached_tokens
        self._queue_time.observe(queue_s)

    def finished(self, event: Finished, reason: FinishReason, e2e_s: float) -> None:
        timings = event.timings
        self._prompt_ms += timings.prompt_ms
        self._predicted_ms += timings.predicted_ms
        now = time.monotonic()
        self._prompt_pace.note(timings.prompt_n, timings.prompt_ms / 1000, now)
        self._predicted_pace.note(timings.predicted_n, timings.predicted_ms / 1000, now)
        self._longest = max(self._longest, event.usage.prompt_tokens + event.usage.completion_tokens)
        self._prefill_time.observe(timings.prompt_ms / 1000)
        self._decode_time.observe(timings.predicted_ms / 1000)
        self._e2e.observe(e2e_s)
        self._request_prompt_tokens.observe(event.usage.prompt_tokens)
        self._request_generation_tokens.observe(event.usage.completion_tokens)
        self._success.labels(self._model, reason.value).inc()

    def pooled(self, num_tokens: int, e2e_s: float) -> None:
        """A call for vectors or scores was answered."""
        self.prompt_tokens += num_tokens
        self.computed_prompt_tokens += num_tokens
        self._e2e.observe(e2e_s)
        self._request_prompt_tokens.observe(num_tokens)

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing: spares the registry a `collect` before there is an engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape, on the event loop."""
        gauges = {
            "llamacpp:prompt_tokens_seconds": (
                "Prompt tokens computed per second, in calls that finished lately.",
                self._prompt_pace.per_second,
            ),
            "llamacpp:predicted_tokens_seconds": (
                "Tokens generated per second and call, in calls that finished lately.",
                self._predicted_pace.per_second,
            ),
            "llamacpp:n_tokens_max": ("Tokens of the longest conversation so far.", self._longest),
        }
        counters = {
            "llamacpp:prompt_tokens": ("Prompt tokens computed.", self.computed_prompt_tokens),
            "llamacpp:prompt_seconds": ("Time spent on the prompts of finished calls.", self._prompt_ms / 1000),
            "llamacpp:tokens_predicted": ("Tokens generated.", self.predicted_tokens),
            "llamacpp:tokens_predicted_seconds": ("Time spent generating, finished calls.", self._predicted_ms / 1000),
            "vllm:prompt_tokens": ("Prompt tokens of started calls, cached ones included.", self.prompt_tokens),
            "vllm:generation_tokens": ("Tokens generated.", self.predicted_tokens),
        }
        forms = CounterMetricFamily(
            "paddock_answer_forms",
            "Schemas and grammars that answers were to be kept to.",
            labels=("model_name", "outcome"),
        )
        told = self._forms()
        for outcome in FORM_OUTCOMES:
            forms.add_metric((self._model, outcome), told.get(outcome, 0))
        yield forms
        for name, (help_, value) in gauges.items():
            gauge = GaugeMetricFamily(name, help_, labels=("model_name",))
            gauge.add_metric((self._model,), value)
            yield gauge
        for name, (help_, value) in counters.items():
            counter = CounterMetricFamily(name, help_, labels=("model_name",))
            counter.add_metric((self._model,), value)
            yield counter

    def _histogram(self, name: str, help_: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, help_, ("model_name",), buckets=buckets, registry=self._registry)
        return family.labels(self._model)
