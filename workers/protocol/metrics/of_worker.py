"""The metrics of a worker: llama-server's and vLLM's names, with their meaning and buckets, where those have one.

Sources: tools/server/README.md of llama.cpp; vLLM's metrics reference.
"""

from __future__ import annotations

from workers.protocol.metrics.metric import (
    DECODE_S,
    E2E_S,
    GAP_S,
    LOAD_S,
    TOKENS,
    TTFT_S,
    Group,
    Kind,
    Metric,
    When,
)

MODEL = ("model_name",)
USED_CELLS = (
    "share of KV cells that calls with a slot hold, 0 to 1; cached prefixes that nobody computes on give way and do "
    "not count"
)
HOLD = "calls that hold a slot"
WAIT = "calls that wait for one in the worker"


def gauge(name: str, help_: str, *labels: str, set_when: When = When.SCRAPE) -> Metric:
    return Metric(name, Kind.GAUGE, help_, (*MODEL, *labels), set_when)


def counter(name: str, help_: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, help_, (*MODEL, *labels), When.HAPPENS)


def histogram(name: str, help_: str, buckets: tuple[float, ...], set_when: When = When.ENDED) -> Metric:
    return Metric(name, Kind.HISTOGRAM, help_, MODEL, set_when, buckets)


REQUESTS_PROCESSING = gauge("llamacpp:requests_processing", HOLD)
REQUESTS_DEFERRED = gauge("llamacpp:requests_deferred", WAIT)
NUM_REQUESTS_RUNNING = gauge("vllm:num_requests_running", HOLD)
NUM_REQUESTS_WAITING = gauge("vllm:num_requests_waiting", WAIT)
REQUEST_SUCCESS = counter("vllm:request_success_total", "calls that ended as they should", "finished_reason")
QUEUE_TIME = histogram("vllm:request_queue_time_seconds", "from submit to a slot", E2E_S)
PREFILL_TIME = histogram("vllm:request_prefill_time_seconds", "computing the prompt", E2E_S)
DECODE_TIME = histogram("vllm:request_decode_time_seconds", "from the first token to the last", E2E_S)
TTFT = histogram("vllm:time_to_first_token_seconds", "from submit to the first token", TTFT_S)
INTER_TOKEN = histogram(
    "vllm:inter_token_latency_seconds",
    "between two tokens of a call as the model made them, also where their text waits for a stop string or a tool call",
    GAP_S,
    When.HAPPENS,
)
E2E = histogram("vllm:e2e_request_latency_seconds", "from submit to the last token", E2E_S)
REQUEST_PROMPT_TOKENS = histogram("vllm:request_prompt_tokens", "prompt tokens of a finished call", TOKENS)
REQUEST_GENERATION_TOKENS = histogram("vllm:request_generation_tokens", "tokens generated for it", TOKENS)

PROMPT_TOKENS = counter(
    "llamacpp:prompt_tokens_total", "prompt tokens computed, those of embeddings and ranking included"
)
PROMPT_CACHED = counter("llamacpp:prompt_tokens_cached_total", "prompt tokens of started calls that were in the cache")
PROMPT_SECONDS = counter(
    "llamacpp:prompt_seconds_total", "time that the prompts of finished calls took; of pooled work the whole call"
)
TOKENS_PREDICTED = counter("llamacpp:tokens_predicted_total", "tokens generated")
PREDICTED_SECONDS = counter("llamacpp:tokens_predicted_seconds_total", "time that finished calls generated")
PROMPT_PACE = gauge(
    "llamacpp:prompt_tokens_seconds",
    "prompt tokens per second of calls that finished lately, one call's own; a call counts half after 30 s. "
    "llama-server has the average since the last scrape instead, which two scrapers would share",
)
PREDICTED_PACE = gauge(
    "llamacpp:predicted_tokens_seconds", "the same of generated tokens; 0 while no call had more than one"
)
N_TOKENS_MAX = gauge("llamacpp:n_tokens_max", "tokens of the longest finished conversation")
N_DECODE = counter("llamacpp:n_decode_total", "calls of `llama_decode`")
N_BUSY = gauge("llamacpp:n_busy_slots_per_decode", "slots in use at such a call, on average since the start")
DECODE = histogram(
    "paddock_decode_seconds",
    "what one such call takes: every running stream waits so long for its next token",
    DECODE_S,
    When.HAPPENS,
)
VLLM_PROMPT_TOKENS = counter("vllm:prompt_tokens_total", "prompt tokens of started calls, cached ones included")
VLLM_GENERATION_TOKENS = counter("vllm:generation_tokens_total", "tokens generated")
NUM_PREEMPTIONS = counter("vllm:num_preemptions_total", "times that a running call gave its cells up for a while")
NUM_SLICES = counter(
    "paddock_slices_total",
    "times that a call of a team over its share gave its slot to another team's call for a while",
)
ANSWER_FORMS = counter(
    "paddock_answer_forms_total",
    "schemas and grammars that answers were to be kept to: `compiled`, `reused` (the compiled one was still there), "
    "`refused`",
    "outcome",
)

KV_USAGE_RATIO = gauge("llamacpp:kv_cache_usage_ratio", USED_CELLS)
KV_TOKENS = gauge("llamacpp:kv_cache_tokens", "those KV cells")
KV_USAGE = gauge("vllm:kv_cache_usage_perc", USED_CELLS)
GPU_USAGE = gauge("vllm:gpu_cache_usage_perc", USED_CELLS)
CACHE_CONFIG = gauge(
    "vllm:cache_config_info",
    "1; `block_size` is 1, `num_gpu_blocks` the number of KV cells",
    "block_size",
    "num_gpu_blocks",
)
KV_CELLS = gauge(
    "paddock_kv_cells",
    "KV cells: `used` by calls with a slot, `idle` (prefixes kept for the next call), `free`",
    "state",
)
PREFIX_QUERIES = counter("vllm:prefix_cache_queries_total", "prompt tokens of calls that began and may use the cache")
PREFIX_HITS = counter("vllm:prefix_cache_hits_total", "those of them that need not be computed")
GPU_PREFIX_QUERIES = counter("vllm:gpu_prefix_cache_queries_total", "the same by its older name")
GPU_PREFIX_HITS = counter("vllm:gpu_prefix_cache_hits_total", "the same by its older name")
PROMPT_SOURCES = counter(
    "paddock_prompt_source_tokens_total",
    "prompt tokens of calls that began: `computed`, `kv` (shared in the cache), `ram`, `disk`",
    "source",
)
PACKED = counter("paddock_packed_tokens_total", "tokens moved within the KV cache to close holes that others left")
RESTORED = counter(
    "paddock_restored_tokens_total",
    "tokens brought back from RAM; calls that had to give their cells up come back so too",
)
FETCHED = counter("paddock_fetched_tokens_total", "tokens read from disk into RAM")
RAM_BYTES = gauge("paddock_cache_ram_bytes", "prefixes kept in RAM")
RAM_BLOCKS = gauge("paddock_cache_ram_blocks", "the same in blocks")
DISK_BYTES = gauge("paddock_cache_disk_bytes", "the disk tier's folder, other workers' files included")
DISK_FILES = gauge("paddock_cache_disk_files", "files in it")
DISK_QUEUED = gauge("paddock_cache_disk_queued_bytes", "what waits to be written there")
DISK_BLOCKS = counter(
    "paddock_cache_disk_blocks_total",
    "blocks of the disk tier: `written`, `read`, `dropped` (the queue was full, the worker ended, or it is larger than "
    "a file may be), `refused` (a file that could not be trusted was removed), `failed` (the system's reasons), "
    "`evicted`",
    "outcome",
)

ADAPTERS_LOADED = gauge("paddock_adapters_loaded", "LoRA adapters in memory")
ADAPTER_LOADS = counter(
    "paddock_adapter_loads_total", "times that one was to be loaded: `loaded`, or `failed`", "outcome"
)
ADAPTER_LOAD = histogram(
    "paddock_adapter_load_seconds", "loading one, fetching its file not counted", LOAD_S, When.HAPPENS
)
ADAPTER_SWITCHES = counter("paddock_adapter_switches_total", "steps before which other adapters were applied")
LORA_INFO = gauge(
    "vllm:lora_requests_info",
    "the unix time; `max_lora`, and the adapters that calls use, separated by commas",
    "max_lora",
    "running_lora_adapters",
    "waiting_lora_adapters",
)

DEVICE_MEMORY = gauge(
    "paddock_device_memory_bytes",
    "memory of a device that llama.cpp computes on, `used` (by any process) or `free`; `CPU` is main memory, of which "
    "`free` is what this process may still take",
    "device",
    "state",
)
WORKER_INFO = gauge("paddock_worker_info", "1; the worker's id, and Paddock's `version`", "worker", "version")
WORKER_SLOTS = gauge("paddock_worker_slots", "calls that it answers at once")
WORKER_DRAINING = gauge("paddock_worker_draining", "1 while it takes no new calls")

GROUPS = (
    Group(
        "Calls",
        (
            *(REQUESTS_PROCESSING, REQUESTS_DEFERRED, NUM_REQUESTS_RUNNING, NUM_REQUESTS_WAITING, REQUEST_SUCCESS),
            *(QUEUE_TIME, PREFILL_TIME, DECODE_TIME, TTFT, INTER_TOKEN, E2E),
            *(REQUEST_PROMPT_TOKENS, REQUEST_GENERATION_TOKENS),
        ),
    ),
    Group(
        "Tokens and steps",
        (
            *(PROMPT_TOKENS, PROMPT_CACHED, PROMPT_SECONDS, TOKENS_PREDICTED, PREDICTED_SECONDS),
            *(PROMPT_PACE, PREDICTED_PACE),
            *(N_TOKENS_MAX, N_DECODE, N_BUSY, DECODE, VLLM_PROMPT_TOKENS, VLLM_GENERATION_TOKENS),
            *(NUM_PREEMPTIONS, NUM_SLICES, ANSWER_FORMS),
        ),
    ),
    Group(
        "Caches",
        (
            *(KV_USAGE_RATIO, KV_TOKENS, KV_USAGE, GPU_USAGE, CACHE_CONFIG, KV_CELLS, PREFIX_QUERIES, PREFIX_HITS),
            *(GPU_PREFIX_QUERIES, GPU_PREFIX_HITS),
            *(PROMPT_SOURCES, PACKED, RESTORED, FETCHED, RAM_BYTES, RAM_BLOCKS),
            *(DISK_BYTES, DISK_FILES, DISK_QUEUED, DISK_BLOCKS),
        ),
    ),
    Group("Adapters", (ADAPTERS_LOADED, ADAPTER_LOADS, ADAPTER_LOAD, ADAPTER_SWITCHES, LORA_INFO)),
    Group("The worker itself", (DEVICE_MEMORY, WORKER_INFO, WORKER_SLOTS, WORKER_DRAINING)),
)
