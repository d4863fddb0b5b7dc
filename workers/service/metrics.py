"""The metrics of a worker's `GET /metrics`, as `workers.protocol.metrics.of_worker` declares them.

This module has those of calls; `workers.service.engine_metrics` has those of the engine. Counts per token are plain
integers here and are written down when somebody scrapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from workers.engine.counters import EngineCounters
from workers.engine.request import EngineLoad
from workers.protocol.devices import DeviceMemory
from workers.protocol.events import Finished, FinishReason, Started
from workers.protocol.metrics import catalogue, of_worker
from workers.protocol.metrics.book import Book
from workers.protocol.metrics.families import Histogram
from workers.protocol.metrics.metric import Metric
from workers.protocol.metrics.process import Process
from workers.service.engine_metrics import EngineMetrics

FORM_OUTCOMES = ("compiled", "reused", "refused")

PACE_S = 30.0
"""Seconds after which a finished call weighs half in the present pace."""


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
        """Tokens per second; 0 before the first call."""
        return self._tokens / self._seconds if self._seconds else 0.0


class Times:
    """A histogram of one model."""

    def __init__(self, book: Book, metric: Metric, model: str) -> None:
        self._family: Histogram = book.histogram(metric)
        self._model = model
        self._family.become([0] * (len(metric.buckets) + 1), 0.0, model)  # shown before the first call

    def observe(self, value: float) -> None:
        self._family.observe(value, self._model)


class WorkerMetrics:
    """One worker's metrics. The event loop counts; `book` renders in any thread."""

    def __init__(
        self,
        model: str,
        load: Callable[[], EngineLoad],
        counters: Callable[[], EngineCounters] = EngineCounters,
        forms: Callable[[], Mapping[str, int]] = dict,
        *,
        worker: str = "",
        version: str = "",
        draining: Callable[[], bool] = bool,
        devices: Callable[[], Sequence[DeviceMemory]] = tuple,
    ) -> None:
        """`forms` returns the number of forms for answers by outcome (`FORM_OUTCOMES`). All of the functions are called
        at each scrape, in its thread.
        """
        self.prompt_tokens = 0
        self.computed_prompt_tokens = 0
        self.predicted_tokens = 0
        self._prompt_ms = 0.0
        self._predicted_ms = 0.0
        self._forms = forms
        self._draining = draining
        self._devices = devices
        self._longest = 0
        self._prompt_pace, self._predicted_pace = Pace(), Pace()
        self._model = model
        book = self.book = Book(catalogue.metrics_of(catalogue.WORKER))
        self.time_to_first_token = Times(book, of_worker.TTFT, model)
        self._queue_time = Times(book, of_worker.QUEUE_TIME, model)
        self._prefill_time = Times(book, of_worker.PREFILL_TIME, model)
        self._decode_time = Times(book, of_worker.DECODE_TIME, model)
        self._e2e = Times(book, of_worker.E2E, model)
        self._request_prompt_tokens = Times(book, of_worker.REQUEST_PROMPT_TOKENS, model)
        self._request_generation_tokens = Times(book, of_worker.REQUEST_GENERATION_TOKENS, model)
        self._success = book.counter(of_worker.REQUEST_SUCCESS)
        self._of_calls = OfCalls(book)
        book.gauge(of_worker.WORKER_INFO).set(1, model, worker, version)
        self._is_draining = book.gauge(of_worker.WORKER_DRAINING)
        self._device_memory = book.gauge(of_worker.DEVICE_MEMORY)
        book.read_first(self._read)
        book.read_first(EngineMetrics(book, model, load, counters).read)
        self.process = Process(book)

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
        # The first token comes with the prompt, in no time of its own.
        self._predicted_pace.note(max(0, timings.predicted_n - 1), timings.predicted_ms / 1000, now)
        self._longest = max(self._longest, event.usage.prompt_tokens + event.usage.completion_tokens)
        self._prefill_time.observe(timings.prompt_ms / 1000)
        self._decode_time.observe(timings.predicted_ms / 1000)
        self._e2e.observe(e2e_s)
        self._request_prompt_tokens.observe(event.usage.prompt_tokens)
        self._request_generation_tokens.observe(event.usage.completion_tokens)
        self._success.inc(self._model, reason.value)

    def pooled(self, num_tokens: int, e2e_s: float) -> None:
        """Count an answered call for vectors or scores."""
        self.prompt_tokens += num_tokens
        self.computed_prompt_tokens += num_tokens
        self._prompt_ms += e2e_s * 1e3
        self._prompt_pace.note(num_tokens, e2e_s, time.monotonic())
        self._e2e.observe(e2e_s)
        self._request_prompt_tokens.observe(num_tokens)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return self.book.render()

    def _read(self) -> None:
        model, calls = self._model, self._of_calls
        for counter, value in (
            (calls.prompt_tokens, self.computed_prompt_tokens),
            (calls.prompt_cached, self.prompt_tokens - self.computed_prompt_tokens),
            (calls.prompt_seconds, self._prompt_ms / 1000),
            (calls.tokens_predicted, self.predicted_tokens),
            (calls.predicted_seconds, self._predicted_ms / 1000),
            (calls.vllm_prompt_tokens, self.prompt_tokens),
            (calls.vllm_generation_tokens, self.predicted_tokens),
        ):
            counter.become(value, model)
        calls.prompt_pace.set(self._prompt_pace.per_second, model)
        calls.predicted_pace.set(self._predicted_pace.per_second, model)
        calls.n_tokens_max.set(self._longest, model)
        told = self._forms()
        for outcome in FORM_OUTCOMES:
            calls.answer_forms.become(told.get(outcome, 0), model, outcome)
        self._is_draining.set(self._draining(), model)
        for one in self._devices():
            self._device_memory.set(one.total - one.free, model, one.device, "used")
            self._device_memory.set(one.free, model, one.device, "free")


class OfCalls:
    """The metrics that are counted as plain numbers."""

    def __init__(self, book: Book) -> None:
        self.prompt_tokens = book.counter(of_worker.PROMPT_TOKENS)
        self.prompt_cached = book.counter(of_worker.PROMPT_CACHED)
        self.prompt_seconds = book.counter(of_worker.PROMPT_SECONDS)
        self.tokens_predicted = book.counter(of_worker.TOKENS_PREDICTED)
        self.predicted_seconds = book.counter(of_worker.PREDICTED_SECONDS)
        self.vllm_prompt_tokens = book.counter(of_worker.VLLM_PROMPT_TOKENS)
        self.vllm_generation_tokens = book.counter(of_worker.VLLM_GENERATION_TOKENS)
        self.prompt_pace = book.gauge(of_worker.PROMPT_PACE)
        self.predicted_pace = book.gauge(of_worker.PREDICTED_PACE)
        self.n_tokens_max = book.gauge(of_worker.N_TOKENS_MAX)
        self.answer_forms = book.counter(of_worker.ANSWER_FORMS)
