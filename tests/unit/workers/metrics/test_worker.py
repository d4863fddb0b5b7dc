"""What a worker's `/metrics` says of an engine that is made up here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct
from prometheus_client import CollectorRegistry

from gateway.commands.config import metrics_of
from tests.support.scrape import Scrape, page_of
from workers.engine.counters import Distribution, EngineCounters, PromptSources
from workers.engine.disk.tier import DiskStats
from workers.engine.request import EngineLoad
from workers.metrics.page import OPENMETRICS, TEXT, slices
from workers.metrics.types import DECODE_S, GAP_S, LOAD_S
from workers.metrics.worker import PACE_S, Pace, WorkerMetrics
from workers.protocol.events import Finished, FinishReason, Timings, Usage
from workers.protocol.heartbeat import DeviceMemory


def spread(bounds: tuple[float, ...], total: float, counts: dict[float, int]) -> Distribution:
    """`counts`: how many values lie in the bucket up to a bound."""
    return Distribution(bounds, (*(counts.get(bound, 0) for bound in bounds), 0), total)


LOAD = EngineLoad(slots=4, slots_busy=3, waiting=2, kv_tokens=1000, kv_tokens_used=250)
DISK = DiskStats(5000, 7, 11, 12, 13, 14, 15, 16, 17, 1.0, 2.0)
COUNTERS = EngineCounters(
    num_decodes=10,
    num_busy=25,
    num_preempted=3,
    num_sliced=7,
    num_restored=400,
    num_fetched=128,
    num_queried=900,
    sources=PromptSources(computed=300, kv=350, ram=200, disk=100),
    decode_s=spread(DECODE_S, 6.5, {0.1: 4, 1.0: 5, 30.0: 1}),
    gap_s=spread(GAP_S, 0.75, {0.01: 1, 0.5: 2}),
    idle_cells=150,
    ram_bytes=4096,
    ram_blocks=6,
    disk=DISK,
    num_switches=21,
    adapter_load_s=spread(LOAD_S, 0.5, {0.1: 2, 0.25: 1}),
    num_adapter_failures=4,
    adapters_loaded=2,
    max_adapters=8,
    adapters_running=("a", "b"),
    adapters_waiting=("c",),
)

FINISHED = Finished(1, FinishReason.STOP, Usage(40, 20, 10), Timings(10, 30, 500.0, 20, 2000.0))


def worker(
    counters: Callable[[], EngineCounters] = EngineCounters,
    forms: Callable[[], Mapping[str, int]] = dict,
    devices: Callable[[], Sequence[DeviceMemory]] = tuple,
) -> WorkerMetrics:
    return WorkerMetrics(CollectorRegistry(), "m", lambda: LOAD, counters, forms, devices=devices)


def samples(metrics: WorkerMetrics) -> dict[str, float]:
    """Series -> value, as they stand in the text."""
    lines = [line for line in page_of(metrics.registry).splitlines() if not line.startswith("#")]
    return {series: float(value) for series, value in (line.rsplit(" ", 1) for line in lines)}


def labels(**more: str) -> str:
    pairs = sorted({"model_name": "m", **more}.items())
    return "{" + ",".join(f'{name}="{value}"' for name, value in pairs) + "}"


def test_what_the_engine_counts_is_shown() -> None:
    found = samples(worker(lambda: COUNTERS))
    expected = {
        "llamacpp:requests_processing": 3,
        "llamacpp:requests_deferred": 2,
        "vllm:kv_cache_usage_perc": 0.25,
        "llamacpp:kv_cache_tokens": 250,
        "llamacpp:n_decode_total": 10,
        "llamacpp:n_busy_slots_per_decode": 2.5,
        "vllm:prefix_cache_queries_total": 900,
        "vllm:prefix_cache_hits_total": 650,
        "vllm:num_preemptions_total": 3,
        "paddock_slices_total": 7,
        "paddock_restored_tokens_total": 400,
        "paddock_fetched_tokens_total": 128,
        "paddock_cache_ram_bytes": 4096,
        "paddock_cache_ram_blocks": 6,
        "paddock_cache_disk_bytes": 5000,
        "paddock_cache_disk_files": 7,
        "paddock_cache_disk_queued_bytes": 17,
        "paddock_adapters_loaded": 2,
        "paddock_adapter_switches_total": 21,
        "vllm:inter_token_latency_seconds_count": 3,
        "vllm:inter_token_latency_seconds_sum": 0.75,
        "paddock_decode_seconds_count": 10,
        "paddock_decode_seconds_sum": 6.5,
    }
    assert {name: found[name + labels()] for name in expected} == expected


def test_what_has_a_label_of_its_own() -> None:
    found = samples(worker(lambda: COUNTERS))
    for name, label, values in (
        ("paddock_kv_cells", "state", {"used": 250, "idle": 150, "free": 600}),
        ("paddock_prompt_source_tokens_total", "source", {"computed": 300, "kv": 350, "ram": 200, "disk": 100}),
        (
            "paddock_cache_disk_blocks_total",
            "outcome",
            {"written": 11, "read": 12, "dropped": 13, "refused": 14, "failed": 15, "evicted": 16},
        ),
        ("paddock_adapter_loads_total", "outcome", {"loaded": 3, "failed": 4}),
    ):
        shown = {key: value for key, value in found.items() if key.startswith(name + "{")}
        assert shown == {name + labels(**{label: key}): value for key, value in values.items()}
    for name, values in (
        ("paddock_decode_seconds", {"0.05": 0, "0.1": 4, "1.0": 9, "10.0": 9, "30.0": 10, "+Inf": 10}),
        ("vllm:inter_token_latency_seconds", {"0.01": 1, "0.4": 1, "0.5": 3, "+Inf": 3}),
        ("paddock_adapter_load_seconds", {"0.05": 0, "0.1": 2, "0.25": 3, "+Inf": 3}),
    ):
        assert {le: found[f"{name}_bucket{labels(le=le)}"] for le in values} == values


def test_adapters_in_use_are_named() -> None:
    found = samples(worker(lambda: COUNTERS))
    series = "vllm:lora_requests_info" + labels(max_lora="8", running_lora_adapters="a,b", waiting_lora_adapters="c")
    assert found[series] > 1.6e9


def test_what_the_worker_says_of_itself() -> None:
    draining = [False]
    memory = (DeviceMemory("CUDA0", 1000, 400), DeviceMemory("CPU", 50, 50))
    metrics = WorkerMetrics(
        CollectorRegistry(),
        "m",
        lambda: LOAD,
        EngineCounters,
        worker="w1",
        version="1.2",
        draining=lambda: draining[0],
        devices=lambda: memory,
    )
    found = samples(metrics)
    assert found["paddock_worker_info" + labels(worker="w1", version="1.2")] == 1
    assert found["paddock_worker_slots" + labels()] == 4
    assert found["paddock_worker_draining" + labels()] == 0
    for device, state, value in (
        ("CUDA0", "used", 600),
        ("CUDA0", "free", 400),
        ("CPU", "used", 0),
        ("CPU", "free", 50),
    ):
        assert found["paddock_device_memory_bytes" + labels(device=device, state=state)] == value
    draining[0] = True
    assert samples(metrics)["paddock_worker_draining" + labels()] == 1


def test_what_is_declared_is_shown() -> None:
    memory = (DeviceMemory("CPU", 50, 50),)
    metrics = worker(lambda: COUNTERS, devices=lambda: memory)
    metrics.finished(FINISHED, FinishReason.STOP, 2.5)
    Scrape(page_of(metrics.registry)).has_exactly(metrics_of(metrics.groups))


def test_both_formats_have_the_same_series() -> None:
    metrics = worker(lambda: COUNTERS, devices=lambda: (DeviceMemory("CPU", 50, 50),))
    metrics.finished(FINISHED, FinishReason.STOP, 2.5)
    pages = [b"".join(slices(metrics.registry, form)).decode().splitlines() for form in (TEXT, OPENMETRICS)]
    text, openmetrics = ([line.rsplit(" ", 1)[0] for line in page if line[0] != "#"] for page in pages)
    assert text == openmetrics
    assert "vllm:num_requests_waiting" + labels() in text


# What others read. A name that changes here breaks what they do.

INFERENCE_EXTENSION = {
    # The Gateway API inference extension's model server protocol, and the flags of its endpoint picker.
    "vllm:num_requests_waiting": {"model_name"},
    "vllm:num_requests_running": {"model_name"},
    "vllm:kv_cache_usage_perc": {"model_name"},
    "vllm:lora_requests_info": {"model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"},
    "vllm:cache_config_info": {"model_name", "block_size", "num_gpu_blocks"},
}
PRODUCTION_STACK = {
    # The scraper of vLLM's production stack, which keeps to older names of vLLM; its boards read the newer ones.
    "vllm:num_requests_running": {"model_name"},
    "vllm:num_requests_waiting": {"model_name"},
    "vllm:gpu_cache_usage_perc": {"model_name"},
    "vllm:gpu_prefix_cache_hits_total": {"model_name"},
    "vllm:gpu_prefix_cache_queries_total": {"model_name"},
}


@pytest.mark.parametrize("read", [INFERENCE_EXTENSION, PRODUCTION_STACK], ids=["extension", "stack"])
def test_what_pickers_and_scrapers_read(read: dict[str, set[str]]) -> None:
    shown = Scrape(page_of(worker(lambda: COUNTERS).registry))
    for name, wanted in read.items():
        assert shown.labels[name] == {frozenset(wanted)}, name
        if not name.endswith("_total"):
            assert shown.kinds[name] == "gauge", name
    assert shown.value("vllm:cache_config_info", model_name="m", block_size="1", num_gpu_blocks="1000") == 1
    assert 0 <= shown.sum("vllm:kv_cache_usage_perc") <= 1
    lora = [dict(has) for of, has in shown.values if of == "vllm:lora_requests_info"]
    assert [(one["max_lora"], one["running_lora_adapters"], one["waiting_lora_adapters"]) for one in lora] == [
        ("8", "a,b", "c")
    ], "one series, which the latest value stands in"


def test_adapters_that_are_no_longer_used_leave_no_series() -> None:
    counters = [COUNTERS]
    metrics = worker(lambda: counters[0])
    page_of(metrics.registry)
    counters[0] = replace(COUNTERS, adapters_running=(), adapters_waiting=())
    found = [name for name in samples(metrics) if name.startswith("vllm:lora_requests_info")]
    assert found == [
        "vllm:lora_requests_info" + labels(max_lora="8", running_lora_adapters="", waiting_lora_adapters="")
    ]


def test_an_engine_that_counts_nothing_shows_the_same_metrics() -> None:
    idle = page_of(worker().registry).splitlines()
    busy = page_of(worker(lambda: COUNTERS).registry).splitlines()
    assert [line for line in idle if line.startswith("# TYPE")] == [line for line in busy if line.startswith("# TYPE")]


def test_forms_are_counted_by_outcome() -> None:
    found = samples(worker(forms=lambda: {"compiled": 2, "reused": 5}))
    shown = [found["paddock_answer_forms_total" + labels(outcome=name)] for name in ("compiled", "reused", "refused")]
    assert shown == [2, 5, 0]


def test_the_pace_is_that_of_late() -> None:
    pace = Pace()
    assert pace.per_second == 0
    pace.note(100, 1.0, now=1000.0)
    assert pace.per_second == 100
    pace.note(10, 1.0, now=1000.0 + PACE_S)
    assert pace.per_second == (50 + 10) / (0.5 + 1)
    pace.note(10, 1.0, now=1000.0 + 50 * PACE_S)
    assert abs(pace.per_second - 10) < 1e-6


def test_a_finished_call_shows_its_pace_and_its_length() -> None:
    metrics = worker()
    metrics.finished(FINISHED, FinishReason.STOP, 2.5)
    found = samples(metrics)
    assert found["llamacpp:prompt_tokens_seconds" + labels()] == 60
    assert found["llamacpp:predicted_tokens_seconds" + labels()] == 9.5, "the first token came with the prompt"
    assert found["llamacpp:n_tokens_max" + labels()] == 60


def test_one_token_has_no_rate() -> None:
    metrics = worker()
    timings = replace_struct(FINISHED.timings, predicted_n=1, predicted_ms=0.02)
    metrics.finished(replace_struct(FINISHED, timings=timings), FinishReason.LENGTH, 2.5)
    assert samples(metrics)["llamacpp:predicted_tokens_seconds" + labels()] == 0


def test_pooled_work_counts_as_prompt_tokens_with_its_time() -> None:
    metrics = worker()
    metrics.pooled(30, 0.5)
    found = samples(metrics)
    assert found["llamacpp:prompt_tokens_total" + labels()] == 30
    assert found["llamacpp:prompt_seconds_total" + labels()] == 0.5
    assert found["llamacpp:prompt_tokens_seconds" + labels()] == 60
