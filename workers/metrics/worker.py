"""The metrics of a worker's `GET /metrics`.

Metrics that are timed or counted by call are here; those that are read at a scrape are in `workers.metrics.readings`.
Counts of tokens are plain integers, which are read at a scrape too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from workers.metrics.readings import MODEL, READINGS, Now, WorkerCollector
from workers.metrics.types import E2E_S, TOKENS, TTFT_S, Group, Histogram, ProcessMetrics
from workers.protocol.events import Finished, FinishReason, Started
from workers.protocol.heartbeat import DeviceMemory

if TYPE_CHECKING:
    from workers.engine.counters import EngineCounters
    from workers.engine.request import EngineLoad

PACE_S = 30.0
"""Half-life in a `Pace`, seconds: a call that finished so long ago weighs half of one that has just finished."""


class Pace:
    """Tokens per second of the calls that finished lately, as a decaying average."""

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
        """Tokens per second; 0 before a first call has finished."""
        return self._tokens / self._seconds if self._seconds else 0.0


class WorkerMetrics:
    """One worker's metrics. Counting is done on the event loop; the registry can be collected on any thread."""

    def __init__(
        self,
        registry: CollectorRegistry,
        model: str,
        load: Callable[[], EngineLoad],
        counters: Callable[[], EngineCounters],
        forms: Callable[[], Mapping[str, int]] = dict,
        *,
        worker: str = "",
        version: str = "",
        draining: Callable[[], bool] = bool,
        devices: Callable[[], Sequence[DeviceMemory]] = tuple,
    ) -> None:
        """`forms` returns the number of schemas and grammars that answers had to follow, by outcome (`FORM_OUTCOMES`).
        All of the functions are called at each scrape, on the scrape's thread."""
        self.registry = registry
        self.prompt_tokens = 0
        self.computed_prompt_tokens = 0
        self.predicted_tokens = 0
        self._prompt_ms = 0.0
        self._predicted_ms = 0.0
        self._longest = 0
        self._prompt_pace, self._predicted_pace = Pace(), Pace()
        self._model, self._worker, self._version = model, worker, version
        self._load, self._counters, self._forms = load, counters, forms
        self._draining, self._devices = draining, devices
        registry.register(WorkerCollector(model, self._now))
        groups = [
            Group(title, registry, [reading.metric for reading in readings]) for title, readings in READINGS.items()
        ]
        calls = groups[0]

        def times(name: str, help_: str, buckets: tuple[float, ...] = E2E_S) -> Histogram:
            return calls.histogram(name, help_, MODEL, buckets).labels(model)

        self._success = calls.counter(
            "vllm:request_success_total", "calls that ended as they should", (*MODEL, "finished_reason")
        )
        self._queue_time = times("vllm:request_queue_time_seconds", "from submit to a slot")
        self._prefill_time = times("vllm:request_prefill_time_seconds", "computing the prompt")
        self._decode_time = times("vllm:request_decode_time_seconds", "from the first token to the last")
        self.time_to_first_token = times("vllm:time_to_first_token_seconds", "from submit to the first token", TTFT_S)
        self._e2e = times("vllm:e2e_request_latency_seconds", "from submit to the last token")
        self._request_prompt_tokens = times("vllm:request_prompt_tokens", "prompt tokens of a finished call", TOKENS)
        self._request_generation_tokens = times("vllm:request_generation_tokens", "tokens generated for it", TOKENS)
        self.process = ProcessMetrics(registry)
        self.groups = (*groups, self.process.group)

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
        # The first token comes from the prompt's computation and takes no time of its own.
        self._predicted_pace.note(max(0, timings.predicted_n - 1), timings.predicted_ms / 1000, now)
        self._longest = max(self._longest, event.usage.prompt_tokens + event.usage.completion_tokens)
        self._prefill_time.observe(timings.prompt_ms / 1000)
        self._decode_time.observe(timings.predicted_ms / 1000)
        self._e2e.observe(e2e_s)
        self._request_prompt_tokens.observe(event.usage.prompt_tokens)
        self._request_generation_tokens.observe(event.usage.completion_tokens)
        self._success.labels(self._model, reason.value).inc()

    def pooled(self, num_tokens: int, e2e_s: float) -> None:
        """Count a finished call for vectors or scores."""
        self.prompt_tokens += num_tokens
        self.computed_prompt_tokens += num_tokens
        self._prompt_ms += e2e_s * 1e3
        self._prompt_pace.note(num_tokens, e2e_s, time.monotonic())
        self._e2e.observe(e2e_s)
        self._request_prompt_tokens.observe(num_tokens)

    def _now(self) -> Now:
        return Now(
            worker=self._worker,
            version=self._version,
            load=self._load(),
            counters=self._counters(),
            is_draining=self._draining(),
            devices=self._devices(),
            forms=self._forms(),
            prompt_tokens=self.prompt_tokens,
            computed_prompt_tokens=self.computed_prompt_tokens,
            prompt_s=self._prompt_ms / 1000,
            predicted_tokens=self.predicted_tokens,
            predicted_s=self._predicted_ms / 1000,
            prompt_pace=self._prompt_pace.per_second,
            predicted_pace=self._predicted_pace.per_second,
            longest=self._longest,
        )
