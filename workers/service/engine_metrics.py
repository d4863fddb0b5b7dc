"""The engine's part of a worker's `GET /metrics`: slots, KV cells, caches, steps, adapters.

It is read from the engine when somebody scrapes; nothing here costs a step anything. The set of metrics is always the
same: those of a part that a worker lacks, such as a disk tier, are zero.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from workers.engine.counters import Distribution, EngineCounters
from workers.engine.disk import DiskStats
from workers.engine.request import EngineLoad
from workers.protocol.metrics import of_worker
from workers.protocol.metrics.book import Book
from workers.protocol.metrics.metric import Kind, Metric

NO_DISK = DiskStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0)

PLAIN = (
    *(of_worker.REQUESTS_PROCESSING, of_worker.REQUESTS_DEFERRED),
    *(of_worker.NUM_REQUESTS_RUNNING, of_worker.NUM_REQUESTS_WAITING),
    *(of_worker.KV_USAGE_RATIO, of_worker.KV_USAGE, of_worker.GPU_USAGE, of_worker.KV_TOKENS),
    *(of_worker.N_DECODE, of_worker.N_BUSY, of_worker.NUM_PREEMPTIONS, of_worker.NUM_SLICES),
    *(of_worker.PREFIX_QUERIES, of_worker.PREFIX_HITS, of_worker.GPU_PREFIX_QUERIES, of_worker.GPU_PREFIX_HITS),
    *(of_worker.PACKED, of_worker.RESTORED, of_worker.FETCHED, of_worker.RAM_BYTES, of_worker.RAM_BLOCKS),
    *(of_worker.DISK_BYTES, of_worker.DISK_FILES, of_worker.DISK_QUEUED),
    *(of_worker.ADAPTERS_LOADED, of_worker.ADAPTER_SWITCHES, of_worker.WORKER_SLOTS),
)
"""Metrics with no label but the model's name."""
LABELLED = (of_worker.KV_CELLS, of_worker.PROMPT_SOURCES, of_worker.DISK_BLOCKS, of_worker.ADAPTER_LOADS)
"""Metrics with one more label."""


class EngineMetrics:
    """The engine's metrics, read from two snapshots per scrape."""

    def __init__(
        self, book: Book, model: str, load: Callable[[], EngineLoad], counters: Callable[[], EngineCounters]
    ) -> None:
        self._model = model
        self._load = load
        self._counters = counters
        opened = (*PLAIN, *LABELLED)
        self._gauges = {metric: book.gauge(metric) for metric in opened if metric.kind is Kind.GAUGE}
        self._totals = {metric: book.counter(metric) for metric in opened if metric.kind is Kind.COUNTER}
        histograms = (of_worker.DECODE, of_worker.INTER_TOKEN, of_worker.ADAPTER_LOAD)
        self._histograms = {metric: book.histogram(metric) for metric in histograms}
        self._cache_config = book.gauge(of_worker.CACHE_CONFIG)
        self._lora_info = book.gauge(of_worker.LORA_INFO)

    def read(self) -> None:
        """Set all metrics. Called at each scrape, in its thread."""
        load, counters = self._load(), self._counters()
        for values in (_of_load(load), _of_steps(counters), _of_caches(counters), _of_adapters(counters)):
            for metric, value, *label in values:
                if metric.kind is Kind.GAUGE:
                    self._gauges[metric].set(value, self._model, *label)
                else:
                    self._totals[metric].become(value, self._model, *label)
        self._read_cells(load, counters)
        self._show(of_worker.DECODE, counters.decode_s)
        self._show(of_worker.INTER_TOKEN, counters.gap_s)
        self._show(of_worker.ADAPTER_LOAD, counters.adapter_load_s)
        names = (",".join(counters.adapters_running), ",".join(counters.adapters_waiting))
        self._lora_info.only(time.time(), self._model, str(counters.max_adapters), *names)

    def _read_cells(self, load: EngineLoad, counters: EngineCounters) -> None:
        cells = self._gauges[of_worker.KV_CELLS]
        num_free = max(0, load.kv_tokens - load.kv_tokens_used - counters.idle_cells)
        for state, value in (("used", load.kv_tokens_used), ("idle", counters.idle_cells), ("free", num_free)):
            cells.set(value, self._model, state)
        self._cache_config.only(1, self._model, "1", str(load.kv_tokens))

    def _show(self, metric: Metric, values: Distribution) -> None:
        self._histograms[metric].become(values.counts, values.total, self._model)


Row = tuple[Metric, float] | tuple[Metric, float, str]


def _of_load(load: EngineLoad) -> Iterable[Row]:
    ratio = load.kv_tokens_used / load.kv_tokens if load.kv_tokens else 0.0
    yield of_worker.REQUESTS_PROCESSING, load.slots_busy
    yield of_worker.REQUESTS_DEFERRED, load.waiting
    yield of_worker.NUM_REQUESTS_RUNNING, load.slots_busy
    yield of_worker.NUM_REQUESTS_WAITING, load.waiting
    yield of_worker.KV_USAGE_RATIO, ratio
    yield of_worker.KV_USAGE, ratio
    yield of_worker.GPU_USAGE, ratio
    yield of_worker.KV_TOKENS, load.kv_tokens_used
    yield of_worker.WORKER_SLOTS, load.slots


def _of_steps(counters: EngineCounters) -> Iterable[Row]:
    sources = counters.sources
    yield of_worker.N_DECODE, counters.num_decodes
    yield of_worker.N_BUSY, counters.num_busy / max(counters.num_decodes, 1)
    yield of_worker.NUM_PREEMPTIONS, counters.num_preempted
    yield of_worker.NUM_SLICES, counters.num_sliced
    num_hits = sources.kv + sources.ram + sources.disk
    yield of_worker.PREFIX_QUERIES, counters.num_queried
    yield of_worker.PREFIX_HITS, num_hits
    yield of_worker.GPU_PREFIX_QUERIES, counters.num_queried
    yield of_worker.GPU_PREFIX_HITS, num_hits
    yield of_worker.PROMPT_SOURCES, sources.computed, "computed"
    yield of_worker.PROMPT_SOURCES, sources.kv, "kv"
    yield of_worker.PROMPT_SOURCES, sources.ram, "ram"
    yield of_worker.PROMPT_SOURCES, sources.disk, "disk"


def _of_caches(counters: EngineCounters) -> Iterable[Row]:
    disk = counters.disk or NO_DISK
    yield of_worker.PACKED, counters.num_packed
    yield of_worker.RESTORED, counters.num_restored
    yield of_worker.FETCHED, counters.num_fetched
    yield of_worker.RAM_BYTES, counters.ram_bytes
    yield of_worker.RAM_BLOCKS, counters.ram_blocks
    yield of_worker.DISK_BYTES, disk.num_bytes
    yield of_worker.DISK_FILES, disk.num_files
    yield of_worker.DISK_QUEUED, disk.queued_bytes
    yield of_worker.DISK_BLOCKS, disk.num_written, "written"
    yield of_worker.DISK_BLOCKS, disk.num_read, "read"
    yield of_worker.DISK_BLOCKS, disk.num_dropped, "dropped"
    yield of_worker.DISK_BLOCKS, disk.num_refused, "refused"
    yield of_worker.DISK_BLOCKS, disk.num_failed, "failed"
    yield of_worker.DISK_BLOCKS, disk.num_evicted, "evicted"


def _of_adapters(counters: EngineCounters) -> Iterable[Row]:
    yield of_worker.ADAPTERS_LOADED, counters.adapters_loaded
    yield of_worker.ADAPTER_SWITCHES, counters.num_switches
    yield of_worker.ADAPTER_LOADS, sum(counters.adapter_load_s.counts), "loaded"
    yield of_worker.ADAPTER_LOADS, counters.num_adapter_failures, "failed"
