"""Workers and their GPUs: slots, KV cells, the speed of a step, caches and tiers, adapters, memory."""

from __future__ import annotations

from boards.board import Board
from boards.panel import Panel, Query, Row, Shape, Step
from boards.promql import OF_WORKER, all_see, came_and_went, or_zero, quantile, rate, ratio

WORKER = "{{worker}}"
USED, FREE = 'state="used"', 'state="free"'
IS_WORKER = f"and on (instance) paddock_worker_info{{{OF_WORKER}}}"


def _of_each(gauge: str, more: str = "") -> str:
    labels = f"{more}, {OF_WORKER}" if more else OF_WORKER
    return f"{gauge}{{{labels}}}"


FLEET = Row(
    "Fleet",
    (
        Panel(
            "Workers",
            "Each worker that Prometheus reaches: its model, version, slots, calls, and the share of KV cells in use.",
            (
                Query(f"count by (worker, model_name, version) ({_of_each('paddock_worker_info')})", "Processes"),
                Query(f"sum by (worker, model_name) ({_of_each('paddock_worker_slots')})", "Slots"),
                Query(f"sum by (worker, model_name) ({_of_each('vllm:num_requests_running')})", "Running"),
                Query(f"max by (worker, model_name) ({_of_each('vllm:kv_cache_usage_perc')})", "KV in use"),
                Query(f"max by (worker, model_name) ({_of_each('paddock_worker_draining')})", "Draining"),
            ),
            "none",
            Shape.TABLE,
            width=12,
            units=(("KV in use", "percentunit"),),
        ),
        Panel(
            "Processes that came and went",
            "In five minutes, as gateways saw it. `lost` did not drain before it went.",
            tuple(Query(expr, legend) for legend, expr in came_and_went().items()),
            width=6,
        ),
        Panel(
            "Circuits open",
            "Workers that failed call after call and are left alone for a while.",
            (Query(all_see("paddock_circuits"), "{{model}}"),),
            steps=(Step(1, "orange"),),
            width=6,
        ),
    ),
)

CALLS = Row(
    "Calls",
    (
        Panel(
            "Slots in use",
            "Calls that each worker computes now.",
            (Query(_of_each("vllm:num_requests_running"), WORKER),),
            stacked=True,
        ),
        Panel(
            "Calls that wait inside",
            "They have a slot's lease but not yet its KV cells. Long above zero: prompts are too long for the cells.",
            (Query(_of_each("vllm:num_requests_waiting"), WORKER),),
            stacked=True,
        ),
        Panel(
            "Slots busy at a step",
            "On average since the start. The more, the more tokens come of one reading of the weights.",
            (Query(_of_each("llamacpp:n_busy_slots_per_decode"), WORKER),),
        ),
        Panel(
            "Tokens generated",
            "Per second.",
            (Query(rate("vllm:generation_tokens_total", OF_WORKER, by="worker"), WORKER),),
            "suffix: tok/s",
            stacked=True,
        ),
        Panel(
            "Prompt tokens computed",
            "Per second, without what a cache had.",
            (Query(rate("llamacpp:prompt_tokens_total", OF_WORKER, by="worker"), WORKER),),
            "suffix: tok/s",
            stacked=True,
        ),
        Panel(
            "One step, p50 and p99",
            "One call of llama_decode: every running stream waits so long for its next token.",
            tuple(
                Query(quantile(share, "paddock_decode_seconds", OF_WORKER, by="worker"), f"{WORKER} p{share * 100:.0f}")
                for share in (0.5, 0.99)
            ),
            "s",
        ),
        Panel(
            "Between two tokens, p99",
            "As the model made them. Far above the time of a step: prompts of others come in between.",
            (Query(quantile(0.99, "vllm:inter_token_latency_seconds", OF_WORKER, by="worker"), WORKER),),
            "s",
        ),
        Panel(
            "Drafted tokens",
            "Per second, by where the drafts came from: those that were drawn, and those that were not.",
            (
                Query(
                    rate("paddock_draft_tokens_total", OF_WORKER, by="source, outcome"),
                    "{{source}}: {{outcome}}",
                ),
            ),
            "suffix: tok/s",
            stacked=True,
        ),
        Panel(
            "Computing a prompt, p95",
            "From a slot to the first token.",
            (Query(quantile(0.95, "vllm:request_prefill_time_seconds", OF_WORKER, by="worker"), WORKER),),
            "s",
        ),
        Panel(
            "How calls ended",
            "Per second: `stop`, `length` and so on, as the model ended them.",
            (
                Query(
                    rate("vllm:request_success_total", OF_WORKER, by="model_name, finished_reason"),
                    "{{model_name}}: {{finished_reason}}",
                ),
            ),
            "reqps",
            stacked=True,
        ),
    ),
)

CACHES = Row(
    "KV cells and caches",
    (
        Panel(
            "KV cells in use",
            "Share that running calls hold. Prefixes that nobody computes on give way and do not count.",
            (Query(_of_each("vllm:kv_cache_usage_perc"), WORKER),),
            "percentunit",
            steps=(Step(0.9, "orange"),),
            maximum=1,
        ),
        Panel(
            "KV cells by holder",
            "`used` by running calls, `idle` prefixes kept for the next call, `free`. Much idle is good.",
            (Query(f"sum by (state) ({_of_each('paddock_kv_cells')})", "{{state}}"),),
            stacked=True,
        ),
        Panel(
            "Preemptions",
            "In five minutes: calls that gave their cells up for a while. They lose time, no words.",
            (Query(f"sum by (worker) (increase({_of_each('vllm:num_preemptions_total')}[5m]))", WORKER),),
            steps=(Step(1, "orange"),),
        ),
        Panel(
            "Where prompts came from",
            "Prompt tokens per second: computed, shared in the KV cache, brought back from RAM, or read from disk.",
            (Query(rate("paddock_prompt_source_tokens_total", OF_WORKER, by="source"), "{{source}}"),),
            "suffix: tok/s",
            stacked=True,
        ),
        Panel(
            "Share of prompts found in a cache",
            "Of calls that may use the cache.",
            (
                Query(
                    ratio(
                        rate("vllm:prefix_cache_hits_total", OF_WORKER, by="worker"),
                        rate("vllm:prefix_cache_queries_total", OF_WORKER, by="worker"),
                    ),
                    WORKER,
                ),
            ),
            "percentunit",
            maximum=1,
        ),
        Panel(
            "Prefixes in RAM",
            "Kept up to `cache_ram_mib` per worker.",
            (Query(_of_each("paddock_cache_ram_bytes"), WORKER),),
            "bytes",
            stacked=True,
        ),
        Panel(
            "Disk tier",
            "The largest folder that a worker sees, and what waits to be written. Zero: there is none.",
            (
                Query(f"max by (model_name) ({_of_each('paddock_cache_disk_bytes')})", "{{model_name}}: on disk"),
                Query(f"sum by (model_name) ({_of_each('paddock_cache_disk_queued_bytes')})", "{{model_name}}: queued"),
            ),
            "bytes",
        ),
        Panel(
            "Blocks of the disk tier",
            "Per second: written, read, dropped (the disk is too slow), refused (not trusted), failed, evicted.",
            (Query(rate("paddock_cache_disk_blocks_total", OF_WORKER, by="outcome"), "{{outcome}}"),),
            "ops",
        ),
        Panel(
            "Tokens moved",
            "Per second: packed within the KV cache, brought back from RAM, read from disk into RAM.",
            (
                Query(rate("paddock_packed_tokens_total", OF_WORKER), "packed"),
                Query(rate("paddock_restored_tokens_total", OF_WORKER), "from RAM"),
                Query(rate("paddock_fetched_tokens_total", OF_WORKER), "from disk"),
            ),
            "suffix: tok/s",
        ),
    ),
)

REST = Row(
    "Memory, GPUs, adapters",
    (
        Panel(
            "Device memory in use",
            "By device that llama.cpp computes on, used by any process. `CPU` is the machine's own memory.",
            (
                Query(
                    ratio(
                        f"sum by (worker, device) ({_of_each('paddock_device_memory_bytes', USED)})",
                        f"sum by (worker, device) ({_of_each('paddock_device_memory_bytes')})",
                    ),
                    "{{worker}} {{device}}",
                ),
            ),
            "percentunit",
            maximum=1,
            steps=(Step(0.95, "orange"),),
        ),
        Panel(
            "Device memory that is free",
            "A worker takes its memory at the start; adapters are loaded into what is left.",
            (Query(_of_each("paddock_device_memory_bytes", FREE), "{{worker}} {{device}}"),),
            "bytes",
        ),
        Panel(
            "Memory of the process",
            "Resident. It should be flat after a warm-up, with RAM's prefixes full.",
            (Query(f"process_resident_memory_bytes {IS_WORKER}", WORKER),),
            "bytes",
        ),
        Panel(
            "CPU of the process",
            "Cores in use. With a GPU about one: the thread that feeds it.",
            (Query(f"rate(process_cpu_seconds_total[$__rate_interval]) {IS_WORKER}", WORKER),),
            "none",
        ),
        Panel(
            "Adapters",
            "LoRA adapters in memory, and steps per second before which other ones were applied.",
            (
                Query(_of_each("paddock_adapters_loaded"), f"{WORKER}: loaded"),
                Query(rate("paddock_adapter_switches_total", OF_WORKER, by="worker"), f"{WORKER}: changes/s"),
            ),
        ),
        Panel(
            "Adapters being loaded",
            "In five minutes, by outcome; and the mean time of one.",
            (
                Query(
                    f"sum by (outcome) (increase({_of_each('paddock_adapter_loads_total')}[5m]))",
                    "{{outcome}}",
                ),
                Query(
                    or_zero(
                        ratio(
                            rate("paddock_adapter_load_seconds_sum", OF_WORKER),
                            rate("paddock_adapter_load_seconds_count", OF_WORKER),
                        )
                    ),
                    "mean seconds",
                ),
            ),
        ),
        Panel(
            "Answers in a form",
            "Schemas and grammars per second: compiled, reused, refused.",
            (Query(rate("paddock_answer_forms_total", OF_WORKER, by="outcome"), "{{outcome}}"),),
            "ops",
        ),
        Panel(
            "Open files",
            "File descriptors of each worker. It should follow the number of gateways and calls.",
            (Query(f"process_open_fds {IS_WORKER}", WORKER),),
        ),
        Panel(
            "Age of the process",
            "How long ago each worker's process started. Young ones that nobody restarted have crashed.",
            (Query(f"time() - process_start_time_seconds {IS_WORKER}", WORKER),),
            "s",
        ),
    ),
)

BOARD = Board(
    "workers",
    "Paddock: workers and GPUs",
    "Slots, KV cells, the speed of a step, caches and tiers, adapters, memory.",
    (FLEET, CALLS, CACHES, REST),
)
