"""Declares a worker's metrics whose values are read at a scrape, each with the function that reads it.

Where llama-server or vLLM has such a metric, its name, meaning and buckets are used. Sources: tools/server/README.md of
llama.cpp; vLLM's metrics reference. The set of metrics is always the same: those of a part that a worker does not have,
such as a disk tier, are zero.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from workers.metrics.types import DECODE_S, GAP_S, LOAD_S, Declaration, Kind, When, bound_text
from workers.protocol.heartbeat import DeviceMemory

if TYPE_CHECKING:
    # docs/metrics.md is generated from these metrics even where no engine is installed.
    from workers.engine.counters import Distribution, EngineCounters
    from workers.engine.request import EngineLoad

MODEL = ("model_name",)
DISK_OUTCOMES = ("written", "read", "dropped", "refused", "failed", "evicted")
FORM_OUTCOMES = ("compiled", "reused", "refused")
USED_CELLS = (
    "share of KV cells that calls with a slot hold, 0 to 1; cached prefixes that nobody computes on give way and do "
    "not count"
)
HOLD = "calls that hold a slot"
WAIT = "calls that wait for one in the worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """The state of a worker at a scrape."""

    worker: str
    version: str
    load: EngineLoad
    counters: EngineCounters
    is_draining: bool
    devices: Sequence[DeviceMemory]
    forms: Mapping[str, int]
    """Outcome (`FORM_OUTCOMES`: compiled, ...) -> number of schemas and grammars demanded for answers."""
    prompt_tokens: int
    computed_prompt_tokens: int
    prompt_s: float
    predicted_tokens: int
    predicted_s: float
    prompt_pace: float
    predicted_pace: float
    longest: int

    @property
    def kv_share(self) -> float:
        return self.load.kv_tokens_used / self.load.kv_tokens if self.load.kv_tokens else 0.0

    @property
    def num_hits(self) -> int:
        """Number of prompt tokens that did not have to be computed."""
        sources = self.counters.sources
        return sources.kv + sources.ram + sources.disk


ByLabels = Mapping[tuple[str, ...], float]
"""A metric's value for each series. Key: the values of its labels, except the first one, the model's name."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A metric and the function that reads its value (of a histogram: its distribution) from the worker's state."""

    metric: Declaration
    read: Callable[[Now], float | ByLabels | Distribution]


def gauge(name: str, help_: str, read: Callable[[Now], float | ByLabels], *labels: str) -> Reading:
    return Reading(Declaration(name, Kind.GAUGE, help_, (*MODEL, *labels)), read)


def counter(name: str, help_: str, read: Callable[[Now], float | ByLabels], *labels: str) -> Reading:
    return Reading(Declaration(name, Kind.COUNTER, help_, (*MODEL, *labels), When.HAPPENS), read)


def histogram(name: str, help_: str, buckets: tuple[float, ...], read: Callable[[Now], Distribution]) -> Reading:
    return Reading(Declaration(name, Kind.HISTOGRAM, help_, MODEL, When.HAPPENS, buckets), read)


CALLS = (
    gauge("llamacpp:requests_processing", HOLD, lambda now: now.load.slots_busy),
    gauge("llamacpp:requests_deferred", WAIT, lambda now: now.load.waiting),
    gauge("vllm:num_requests_running", HOLD, lambda now: now.load.slots_busy),
    gauge("vllm:num_requests_waiting", WAIT, lambda now: now.load.waiting),
    histogram(
        "vllm:inter_token_latency_seconds",
        "between two tokens of a call as the model made them, also where their text waits for a stop string or a tool "
        "call",
        GAP_S,
        lambda now: now.counters.gap_s,
    ),
)

STEPS = (
    counter(
        "llamacpp:prompt_tokens_total",
        "prompt tokens computed, those of embeddings and ranking included",
        lambda now: now.computed_prompt_tokens,
    ),
    counter(
        "llamacpp:prompt_tokens_cached_total",
        "prompt tokens of started calls that were in the cache",
        lambda now: now.prompt_tokens - now.computed_prompt_tokens,
    ),
    counter(
        "llamacpp:prompt_seconds_total",
        "time that the prompts of finished calls took; of pooled work the whole call",
        lambda now: now.prompt_s,
    ),
    counter("llamacpp:tokens_predicted_total", "tokens generated", lambda now: now.predicted_tokens),
    counter(
        "llamacpp:tokens_predicted_seconds_total",
        "time that finished calls generated",
        lambda now: now.predicted_s,
    ),
    gauge(
        "llamacpp:prompt_tokens_seconds",
        "prompt tokens per second of calls that finished lately, one call's own; a call counts half after 30 s. "
        "llama-server has the average since the last scrape instead, which two scrapers would share",
        lambda now: now.prompt_pace,
    ),
    gauge(
        "llamacpp:predicted_tokens_seconds",
        "the same of generated tokens; 0 while no call had more than one",
        lambda now: now.predicted_pace,
    ),
    gauge("llamacpp:n_tokens_max", "tokens of the longest finished conversation", lambda now: now.longest),
    counter("llamacpp:n_decode_total", "calls of `llama_decode`", lambda now: now.counters.num_decodes),
    gauge(
        "llamacpp:n_busy_slots_per_decode",
        "slots in use at such a call, on average since the start",
        lambda now: now.counters.num_busy / max(now.counters.num_decodes, 1),
    ),
    histogram(
        "paddock_decode_seconds",
        "what one such call takes: every running stream waits so long for its next token",
        DECODE_S,
        lambda now: now.counters.decode_s,
    ),
    counter(
        "vllm:prompt_tokens_total",
        "prompt tokens of started calls, cached ones included",
        lambda now: now.prompt_tokens,
    ),
    counter("vllm:generation_tokens_total", "tokens generated", lambda now: now.predicted_tokens),
    counter(
        "vllm:num_preemptions_total",
        "times that a running call gave its cells up for a while",
        lambda now: now.counters.num_preempted,
    ),
    counter(
        "paddock_slices_total",
        "times that a call of a team over its share gave its slot to another team's call for a while",
        lambda now: now.counters.num_sliced,
    ),
    counter(
        "vllm:spec_decode_num_drafts_total",
        "drafts that steps computed beside an answer's next token",
        lambda now: now.counters.num_drafts,
    ),
    counter("vllm:spec_decode_num_draft_tokens_total", "tokens of drafts", lambda now: sum(now.counters.num_drafted)),
    counter(
        "vllm:spec_decode_num_accepted_tokens_total",
        "tokens of drafts that were then drawn",
        lambda now: sum(now.counters.num_accepted),
    ),
    counter(
        "paddock_draft_tokens_total",
        "tokens of drafts by where they came from: `history` (the conversation), `pool` (earlier answers of the same "
        "team, salt and adapters), `prediction` (the caller's), `form` (the text that a schema or grammar leaves), "
        "`model` (a draft model); `accepted` (drawn) or `rejected`",
        lambda now: _drafts(now.counters),
        "source",
        "outcome",
    ),
    counter(
        "paddock_answer_forms_total",
        "schemas and grammars that answers were to be kept to: `compiled`, `reused` (the compiled one was still "
        "there), `refused`",
        lambda now: {(outcome,): now.forms.get(outcome, 0) for outcome in FORM_OUTCOMES},
        "outcome",
    ),
)

CACHES = (
    gauge("llamacpp:kv_cache_usage_ratio", USED_CELLS, lambda now: now.kv_share),
    gauge("llamacpp:kv_cache_tokens", "those KV cells", lambda now: now.load.kv_tokens_used),
    gauge("vllm:kv_cache_usage_perc", USED_CELLS, lambda now: now.kv_share),
    gauge("vllm:gpu_cache_usage_perc", USED_CELLS, lambda now: now.kv_share),
    gauge(
        "vllm:cache_config_info",
        "1; `block_size` is 1, `num_gpu_blocks` the number of KV cells",
        lambda now: {("1", str(now.load.kv_tokens)): 1},
        "block_size",
        "num_gpu_blocks",
    ),
    gauge(
        "paddock_kv_cells",
        "KV cells: `used` by calls with a slot, `idle` (prefixes kept for the next call), `free`",
        lambda now: _cells(now.load, now.counters),
        "state",
    ),
    counter(
        "vllm:prefix_cache_queries_total",
        "prompt tokens of calls that began and may use the cache",
        lambda now: now.counters.num_queried,
    ),
    counter("vllm:prefix_cache_hits_total", "those of them that need not be computed", lambda now: now.num_hits),
    counter("vllm:gpu_prefix_cache_queries_total", "the same by its older name", lambda now: now.counters.num_queried),
    counter("vllm:gpu_prefix_cache_hits_total", "the same by its older name", lambda now: now.num_hits),
    counter(
        "paddock_prompt_source_tokens_total",
        "prompt tokens of calls that began: `computed`, `kv` (shared in the cache), `ram`, `disk`",
        lambda now: {(source,): getattr(now.counters.sources, source) for source in ("computed", "kv", "ram", "disk")},
        "source",
    ),
    counter(
        "paddock_packed_tokens_total",
        "tokens moved within the KV cache to close holes that others left",
        lambda now: now.counters.num_packed,
    ),
    counter(
        "paddock_restored_tokens_total",
        "tokens brought back from RAM; calls that had to give their cells up come back so too",
        lambda now: now.counters.num_restored,
    ),
    counter("paddock_fetched_tokens_total", "tokens read from disk into RAM", lambda now: now.counters.num_fetched),
    gauge("paddock_cache_ram_bytes", "prefixes kept in RAM", lambda now: now.counters.ram_bytes),
    gauge("paddock_cache_ram_blocks", "the same in blocks", lambda now: now.counters.ram_blocks),
    gauge(
        "paddock_cache_disk_bytes",
        "the disk tier's folder, other workers' files included",
        lambda now: now.counters.disk.num_bytes,
    ),
    gauge("paddock_cache_disk_files", "files in it", lambda now: now.counters.disk.num_files),
    gauge(
        "paddock_cache_disk_queued_bytes",
        "what waits to be written there",
        lambda now: now.counters.disk.queued_bytes,
    ),
    counter(
        "paddock_cache_disk_blocks_total",
        "blocks of the disk tier: `written`, `read`, `dropped` (the queue was full, the worker ended, or it is larger "
        "than a file may be), `refused` (a file that could not be trusted was removed), `failed` (the system's "
        "reasons), `evicted`",
        lambda now: {(outcome,): getattr(now.counters.disk, f"num_{outcome}") for outcome in DISK_OUTCOMES},
        "outcome",
    ),
)

ADAPTERS = (
    gauge("paddock_adapters_loaded", "LoRA adapters in memory", lambda now: now.counters.adapters_loaded),
    counter(
        "paddock_adapter_loads_total",
        "times that one was to be loaded: `loaded`, or `failed`",
        lambda now: {
            ("loaded",): sum(now.counters.adapter_load_s.counts),
            ("failed",): now.counters.num_adapter_failures,
        },
        "outcome",
    ),
    histogram(
        "paddock_adapter_load_seconds",
        "loading one, fetching its file not counted",
        LOAD_S,
        lambda now: now.counters.adapter_load_s,
    ),
    counter(
        "paddock_adapter_switches_total",
        "steps before which other adapters were applied",
        lambda now: now.counters.num_switches,
    ),
    gauge(
        "vllm:lora_requests_info",
        "the unix time; `max_lora`, and the adapters that calls use, separated by commas",
        lambda now: {_adapters(now.counters): time.time()},
        "max_lora",
        "running_lora_adapters",
        "waiting_lora_adapters",
    ),
)

ITSELF = (
    gauge(
        "paddock_device_memory_bytes",
        "memory of a device that llama.cpp computes on, `used` (by any process) or `free`; `CPU` is main memory, of "
        "which `free` is what this process may still take",
        lambda now: _memory(now.devices),
        "device",
        "state",
    ),
    gauge(
        "paddock_worker_info",
        "1; the worker's id, and Paddock's `version`",
        lambda now: {(now.worker, now.version): 1},
        "worker",
        "version",
    ),
    gauge("paddock_worker_slots", "calls that it answers at once", lambda now: now.load.slots),
    gauge("paddock_worker_draining", "1 while it takes no new calls", lambda now: now.is_draining),
)

DRAFT_SOURCES = ("history", "pool", "prediction", "form", "model")
"""The names of `Source` (workers/engine/speculation/hit_rates.py), in its order."""


def _drafts(counters: EngineCounters) -> ByLabels:
    """Return the number of drafted tokens by source and outcome."""
    found: dict[tuple[str, ...], float] = {}
    for source, drafted, accepted in zip(DRAFT_SOURCES, counters.num_drafted, counters.num_accepted, strict=True):
        found[source, "accepted"], found[source, "rejected"] = accepted, drafted - accepted
    return found


READINGS = {
    "Calls": CALLS,
    "Tokens and steps": STEPS,
    "Caches": CACHES,
    "Adapters": ADAPTERS,
    "The worker itself": ITSELF,
}
"""Title of a table in docs/metrics.md -> the readings in it."""


class WorkerCollector:
    """Collects the readings for a registry, on any thread."""

    def __init__(self, model: str, now: Callable[[], Now]) -> None:
        self._model = model
        self._now = now

    def describe(self) -> list[Family]:
        metrics = [reading.metric for readings in READINGS.values() for reading in readings]
        return [Family(metric.name.removesuffix("_total"), metric.help, metric.kind) for metric in metrics]

    def collect(self) -> Iterator[Family]:
        now = self._now()
        for readings in READINGS.values():
            for reading in readings:
                yield _family(reading.metric, self._model, reading.read(now))


def _family(metric: Declaration, model: str, value: float | ByLabels | Distribution) -> Family:
    if isinstance(value, int | float):
        value = {(): value}
    if isinstance(value, Mapping):
        kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=metric.labels)
        for labels, number in value.items():
            family.add_metric((model, *labels), number)
        return family
    bounds = map(bound_text, (*value.bounds, float("inf")))
    spread = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    spread.add_metric((model,), list(zip(bounds, accumulate(value.counts), strict=True)), value.total)
    return spread


def _cells(load: EngineLoad, counters: EngineCounters) -> ByLabels:
    num_free = max(0, load.kv_tokens - load.kv_tokens_used - counters.idle_cells)
    return {("used",): load.kv_tokens_used, ("idle",): counters.idle_cells, ("free",): num_free}


def _adapters(counters: EngineCounters) -> tuple[str, ...]:
    return str(counters.max_adapters), ",".join(counters.adapters_running), ",".join(counters.adapters_waiting)


def _memory(devices: Sequence[DeviceMemory]) -> ByLabels:
    return {
        (one.device, state): float(num_bytes)
        for one in devices
        for state, num_bytes in (("used", one.total - one.free), ("free", one.free))
    }
