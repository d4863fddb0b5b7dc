"""What `GET /metrics` of a worker shows of its engine: slots, KV cells, caches, steps, adapters.

Read from the engine when somebody scrapes; nothing here costs a step anything. Names, meaning and buckets are
llama-server's (tools/server/README.md) and vLLM's where they have one. The set of metrics is always the same: what a
worker does not have, a disk tier for one, is zero.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from workers.engine.counters import Distribution, EngineCounters
from workers.engine.disk import DiskStats
from workers.engine.request import EngineLoad

USAGE = "Share of KV cells that calls with a slot hold, 0 to 1; idle prefixes give way and do not count."

NO_DISK = DiskStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0)


class EngineMetrics(Collector):
    """Made of two snapshots per scrape."""

    def __init__(self, model: str, load: Callable[[], EngineLoad], counters: Callable[[], EngineCounters]) -> None:
        self._model = model
        self._load = load
        self._counters = counters

    def describe(self) -> list[Metric]:
        """Nothing: spares the registry a `collect` before there is an engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape, on the event loop."""
        load, counters = self._load(), self._counters()
        disk = counters.disk or NO_DISK
        yield from self._of_load(load)
        yield from self._of_cells(load, counters)
        yield from self._of_steps(counters)
        yield from self._of_prompts(counters)
        yield from self._of_caches(counters, disk)
        yield from self._of_adapters(counters)

    def _of_load(self, load: EngineLoad) -> Iterator[Metric]:
        ratio = load.kv_tokens_used / load.kv_tokens if load.kv_tokens else 0.0
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The KV cache: cells of one token.",
            labels=("model_name", "block_size", "num_gpu_blocks"),
        )
        config.add_metric((self._model, "1", str(load.kv_tokens)), 1)
        yield config
        yield self._gauge("llamacpp:requests_processing", "Calls that hold a slot.", load.slots_busy)
        yield self._gauge("llamacpp:requests_deferred", "Calls that wait for a slot.", load.waiting)
        yield self._gauge("llamacpp:kv_cache_usage_ratio", USAGE, ratio)
        yield self._gauge("llamacpp:kv_cache_tokens", "KV cells that calls with a slot hold.", load.kv_tokens_used)
        yield self._gauge("vllm:num_requests_running", "Calls that hold a slot.", load.slots_busy)
        yield self._gauge("vllm:num_requests_waiting", "Calls that wait for a slot.", load.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", USAGE, ratio)
        yield self._gauge("vllm:gpu_cache_usage_perc", USAGE, ratio)

    def _of_cells(self, load: EngineLoad, counters: EngineCounters) -> Iterator[Metric]:
        cells = GaugeMetricFamily(
            "paddock_kv_cells",
            "KV cells, by who holds them.",
            labels=_labels("state"),
        )
        num_free = max(0, load.kv_tokens - load.kv_tokens_used - counters.idle_cells)
        for state, value in (("used", load.kv_tokens_used), ("idle", counters.idle_cells), ("free", num_free)):
            cells.add_metric((self._model, state), value)
        yield cells

    def _of_steps(self, counters: EngineCounters) -> Iterator[Metric]:
        busy = counters.num_busy / max(counters.num_decodes, 1)
        yield self._counter("llamacpp:n_decode", "Calls of llama_decode.", counters.num_decodes)
        yield self._gauge("llamacpp:n_busy_slots_per_decode", "Busy slots at a call of llama_decode, on average.", busy)
        yield self._histogram("paddock_decode_seconds", "One call of llama_decode.", counters.decode_s)
        yield self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a call, as the model made them.", counters.gap_s
        )
        yield self._counter(
            "vllm:num_preemptions", "Times that a running call gave its cells up for a while.", counters.num_preempted
        )

    def _of_prompts(self, counters: EngineCounters) -> Iterator[Metric]:
        sources = counters.sources
        yield self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens of calls that could use the cache.", counters.num_queried
        )
        yield self._counter(
            "vllm:prefix_cache_hits", "Those that need not be computed.", sources.kv + sources.ram + sources.disk
        )
        values = {"computed": sources.computed, "kv": sources.kv, "ram": sources.ram, "disk": sources.disk}
        yield self._counters_by(
            "paddock_prompt_source_tokens", "Prompt tokens of calls that began, by source.", "source", values
        )

    def _of_caches(self, counters: EngineCounters, disk: DiskStats) -> Iterator[Metric]:
        yield self._counter("paddock_packed_tokens", "Tokens moved within the KV cache.", counters.num_packed)
        yield self._counter("paddock_restored_tokens", "Tokens brought back from RAM.", counters.num_restored)
        yield self._counter("paddock_fetched_tokens", "Tokens read from disk into RAM.", counters.num_fetched)
        yield self._gauge("paddock_cache_ram_bytes", "Saved prefixes in RAM.", counters.ram_bytes)
        yield self._gauge("paddock_cache_ram_blocks", "Saved prefixes in RAM, in blocks.", counters.ram_blocks)
        yield self._gauge("paddock_cache_disk_bytes", "Files of the disk tier, all workers' together.", disk.num_bytes)
        yield self._gauge("paddock_cache_disk_files", "Files of the disk tier, all workers' together.", disk.num_files)
        yield self._gauge("paddock_cache_disk_queued_bytes", "Blocks that wait to be written.", disk.queued_bytes)
        outcomes = {
            "written": disk.num_written,
            "read": disk.num_read,
            "dropped": disk.num_dropped,
            "refused": disk.num_refused,
            "failed": disk.num_failed,
            "evicted": disk.num_evicted,
        }
        yield self._counters_by("paddock_cache_disk_blocks", "Blocks of the disk tier, by fate.", "outcome", outcomes)

    def _of_adapters(self, counters: EngineCounters) -> Iterator[Metric]:
        yield self._gauge("paddock_adapters_loaded", "LoRA adapters in memory.", counters.adapters_loaded)
        yield self._counter(
            "paddock_adapter_switches", "Steps before which other adapters were applied.", counters.num_switches
        )
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters that calls use; the value is the unix time.",
            labels=("model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        names = (",".join(counters.adapters_running), ",".join(counters.adapters_waiting))
        info.add_metric((self._model, str(counters.max_adapters), *names), time.time())
        yield info

    def _gauge(self, name: str, help_: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help_, labels=_labels())
        family.add_metric((self._model,), value)
        return family

    def _counter(self, name: str, help_: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help_, labels=_labels())
        family.add_metric((self._model,), value)
        return family

    def _counters_by(self, name: str, help_: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, help_, labels=_labels(label))
        for key, value in values.items():
            family.add_metric((self._model, key), value)
        return family

    def _histogram(self, name: str, help_: str, values: Distribution) -> Metric:
        buckets, below = [], 0
        for bound, count in zip((*values.bounds, float("inf")), values.counts, strict=True):
            below += count
            buckets.append((_bound(bound), below))
        family = HistogramMetricFamily(name, help_, labels=_labels())
        family.add_metric((self._model,), buckets, values.total)
        return family


def _labels(*more: str) -> tuple[str, ...]:
    return ("model_name", *more)


def _bound(bound: float) -> str:
    """As Prometheus' own histograms write it."""
    return "+Inf" if bound == float("inf") else repr(float(bound))
