"""The metrics of a gateway."""

from __future__ import annotations

from enum import StrEnum

from workers.protocol.metrics.metric import (
    E2E_S,
    GAP_S,
    GEN_AI_DURATION_S,
    GEN_AI_TOKEN_S,
    GEN_AI_TOKENS,
    GEN_AI_TTFT_S,
    LAG_S,
    OVERHEAD_S,
    REDIS_S,
    TTFT_S,
    Group,
    Kind,
    Metric,
    When,
)

COUNTER, GAUGE, HISTOGRAM = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
MODEL = ("model",)
USER = ("model", "alias", "team")
GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model")

REQUESTS = Metric(
    "paddock_requests_total",
    COUNTER,
    "requests that ended; `outcome` is `ok`, `client_gone`, `cancelled` or an error's code; `model` and `alias` are "
    "empty where a request never came to one",
    (*USER, "outcome"),
    When.ENDED,
)
FAILURES = Metric(
    "paddock_failures_total",
    COUNTER,
    "those of them whose `outcome` is not `ok`, by `code`, which is that outcome, and by `who` failed: `caller`, "
    "`policy` (a bound that an operator has set), `worker`, `gateway` (its Redis included)",
    ("model", "who", "code"),
    When.ENDED,
)
IN_FLIGHT = Metric(
    "paddock_requests_in_flight",
    GAUGE,
    "requests between their permission and their end, waiting ones included, by the model that they are with now",
    MODEL,
    When.HAPPENS,
)
TTFT = Metric("paddock_ttft_seconds", HISTOGRAM, "arrival to first token", MODEL, When.ENDED, TTFT_S)
E2E = Metric(
    "paddock_e2e_seconds",
    HISTOGRAM,
    "arrival to end, however it ended; questions about a model (`input_tokens`, `/tokenize`, `/props`, ...) are among "
    "the requests alone, neither here nor by OpenTelemetry's names",
    MODEL,
    When.ENDED,
    E2E_S,
)
TIME_PER_TOKEN = Metric(
    "paddock_time_per_output_token_seconds",
    HISTOGRAM,
    "first token to end, by the tokens after the first; of single answers of two tokens and more",
    MODEL,
    When.ENDED,
    GAP_S,
)
OVERHEAD = Metric(
    "paddock_overhead_seconds",
    HISTOGRAM,
    "arrival to asking the worker, less the wait for a slot",
    MODEL,
    When.ENDED,
    OVERHEAD_S,
)
PROMPT_TOKENS = Metric("paddock_prompt_tokens_total", COUNTER, "prompt tokens, counted by the worker", USER, When.ENDED)
CACHED_TOKENS = Metric(
    "paddock_cached_tokens_total", COUNTER, "those of them that were in a KV cache", USER, When.ENDED
)
GENERATED_TOKENS = Metric(
    "paddock_generated_tokens_total",
    COUNTER,
    "generated tokens, those of answers that were cut off included as far as they came",
    USER,
    When.ENDED,
)
IGNORED = Metric(
    "paddock_parameters_ignored_total",
    COUNTER,
    "requests with a `parameter` that nothing was done with, those that no table names as `unknown`",
    ("parameter",),
    When.ENDED,
)

QUEUE_LENGTH = Metric(
    "paddock_queue_length",
    GAUGE,
    "calls of this gateway that wait for a slot, also for a model that has no worker; 0 for a model of the catalog "
    "that nobody calls",
    MODEL,
)
QUEUE_OLDEST = Metric(
    "paddock_queue_oldest_seconds", GAUGE, "how long the one of them that came first has waited", MODEL
)
PREDICTED_WAIT = Metric(
    "paddock_predicted_wait_seconds",
    GAUGE,
    "how long a call that came now, behind those that wait, would wait for a slot; 0 at a gateway where nobody waits, "
    "though all slots may be busy; of a model without a worker, what the oldest call has waited",
    MODEL,
)
QUEUE_WAIT = Metric(
    "paddock_queue_wait_seconds",
    HISTOGRAM,
    "waiting for a slot, all attempts of a request together",
    MODEL,
    When.ENDED,
    TTFT_S,
)
WAIT_ERROR = Metric(
    "paddock_wait_error_seconds",
    HISTOGRAM,
    "of requests that had to wait and were asked of one worker: how far the wait that they were told at first was off, "
    "either way",
    MODEL,
    When.ENDED,
    TTFT_S,
)
TEAM_QUEUE = Metric(
    "paddock_team_queue_seconds_total",
    COUNTER,
    "the waits of a team's requests, added up; by the rate of its requests: its mean wait",
    ("model", "team"),
    When.ENDED,
)
PLACEMENTS = Metric(
    "paddock_placements_total",
    COUNTER,
    "requests that got a slot: `cached` where the worker was expected to have some of the prompt cached, `uncached` "
    "elsewhere",
    ("model", "how"),
    When.ENDED,
)
OVERTAKEN = Metric(
    "paddock_overtaken_total",
    COUNTER,
    "times that a slot went past a waiting request that wanted it and stood before the one that got it; at most 8 "
    "times each, see [placement.md](placement.md#who-gets-a-freed-slot)",
    MODEL,
    When.ENDED,
)

ATTEMPTS = Metric(
    "paddock_attempts_total",
    COUNTER,
    "submissions to workers: `started`, or the code of the failure that came first",
    ("model", "outcome"),
    When.HAPPENS,
)
RETRIES = Metric(
    "paddock_retries_total",
    COUNTER,
    "calls that failed before their first token in a way that another worker can mend: `granted` another try, or "
    "`denied` one because too many of the model's calls are tried again (`retry_share`)",
    ("model", "outcome"),
    When.HAPPENS,
)
FALLBACKS = Metric(
    "paddock_fallbacks_total",
    COUNTER,
    "calls that went from `model` on to another one of their chain: `no_worker` that would do, `wait` (longer than the "
    "caller waits, as predicted), `queue_full`, `queue_timeout`, `unsuited` (a model that stood in could not take it)",
    ("model", "fallback", "reason"),
    When.HAPPENS,
)
UNKNOWN_MODELS = Metric(
    "paddock_unknown_models_total",
    COUNTER,
    "calls for a name that nobody has which went to the catalog's default, `model`, since it lets them "
    "(`unknown_model: default`)",
    MODEL,
    When.HAPPENS,
)
CIRCUITS_OPENED = Metric(
    "paddock_circuits_opened_total",
    COUNTER,
    "times that a worker failed several calls in a row and was left alone",
    MODEL,
    When.HAPPENS,
)
CIRCUITS = Metric("paddock_circuits", GAUGE, "workers that are left alone now", MODEL)

WORKERS = Metric("paddock_workers", GAUGE, "live workers, draining ones included, as this gateway sees them", MODEL)
WORKERS_DRAINING = Metric("paddock_workers_draining", GAUGE, "those of them that take no new calls", MODEL)
SLOTS = Metric("paddock_slots", GAUGE, "slots of the workers that take calls", MODEL)
SLOTS_BUSY = Metric("paddock_slots_busy", GAUGE, "those of them that calls hold, as the workers last said", MODEL)
WORKER_STARTS = Metric(
    "paddock_worker_starts_total",
    COUNTER,
    "worker processes that came; not those that were there when the gateway started, nor those that were only silent "
    "for a while",
    MODEL,
    When.HAPPENS,
)
LOSSES = DRAINED, LOST = "drained", "lost"
WORKER_LOSSES = Metric(
    "paddock_worker_losses_total",
    COUNTER,
    "worker processes that went: `drained` before, or `lost`",
    ("model", "how"),
    When.HAPPENS,
)
LEASES = Metric("paddock_leases", GAUGE, "slots that calls of this gateway hold", MODEL)
LEASE_ENDS = VOID, CROWDED, EXPIRED = "void", "crowded", "expired"
"""The ways in which a lease may end otherwise than by its call."""
LEASES_LOST = Metric(
    "paddock_leases_lost_total",
    COUNTER,
    "leases that ended otherwise than by their call: `void` (its worker process is gone) and `crowded` (Redis had lost "
    "it and the slot was taken), told by the gateway that held it; `expired` (nobody renewed it, or its worker process "
    "is gone), told by the gateway that swept it out of Redis",
    ("model", "why"),
    When.HAPPENS,
)
REFUSED_KINDS = ("record", "news")
REFUSED_RECORDS = Metric(
    "paddock_redis_records_refused_total",
    COUNTER,
    "readings of what stands in Redis and was not written by who may: a worker's `record` or `news` without the seal "
    "of the worker secret; any at all mean a wrong secret or an intruder",
    ("kind",),
    When.HAPPENS,
)

WITHOUT_REDIS = Metric(
    "paddock_without_redis",
    GAUGE,
    "1 while calls are placed without Redis, on this gateway's share of the slots",
    MODEL,
)
REDIS_UP = Metric("paddock_redis_up", GAUGE, "1 where Redis took this gateway's last heartbeat")
REDIS_TIME = Metric(
    "paddock_redis_seconds",
    HISTOGRAM,
    "asking for a script to be run until its answer, waiting for those asked for before included",
    ("script",),
    When.HAPPENS,
    REDIS_S,
)


class Unread(StrEnum):
    """Names in Redis under which gateways read what others have written."""

    MODELS = "pd:models"
    KEYS = "pd:keys"
    NEWS = "pd:news"
    GATEWAYS = "pd:gateways"
    WORKERS = "pd:{model}:workers"
    WORKER = "pd:{model}:worker"
    HEADS = "pd:{model}:worker:heads"
    ADAPTERS = "pd:{model}:adapters"
    REMOVED = "pd:{model}:adapters-removed"
    SCALES = "pd:{model}:adapter-scales"


UNREADABLE = Metric(
    "paddock_redis_unreadable_total",
    COUNTER,
    "readings that left something out which stands in Redis under `key` and is not as Paddock writes it; the log "
    "names each once. While it stands there, it is met again at each reading",
    ("key",),
    When.HAPPENS,
)
LOOP_LAG = Metric(
    "paddock_loop_lag_seconds",
    HISTOGRAM,
    "how late a timer of the event loop fires, ten times a second: every stream waits so long",
    (),
    When.HAPPENS,
    LAG_S,
)
CONNECTIONS = Metric("paddock_connections", GAUGE, "connections that are open, WebSockets included")
SOCKETS = Metric("paddock_websockets", GAUGE, "WebSockets that are open")
BEYOND_REASONS = ("address", "all", "descriptors")
BEYOND = Metric(
    "paddock_connections_beyond_total",
    COUNTER,
    "connections that came beyond a bound, where only probes are answered; `reason` is `address` (of one address there "
    "are as many as there may be), `all` (of all) or `descriptors` (none is left)",
    ("reason",),
    When.HAPPENS,
)
STOPPING = Metric("paddock_stopping", GAUGE, "1 while the gateway takes no new calls because it is to stop")
BUILD_INFO = Metric("paddock_build_info", GAUGE, "1; `version` is Paddock's", ("version",), When.START)

GEN_AI_DURATION = Metric(
    "gen_ai_server_request_duration_seconds",
    HISTOGRAM,
    "arrival to end; `error_type` is empty where the request succeeded",
    (*GEN_AI, "error_type"),
    When.ENDED,
    GEN_AI_DURATION_S,
)
GEN_AI_TTFT = Metric(
    "gen_ai_server_time_to_first_token_seconds",
    HISTOGRAM,
    "arrival to first token, of requests that succeeded",
    GEN_AI,
    When.ENDED,
    GEN_AI_TTFT_S,
)
GEN_AI_TOKEN = Metric(
    "gen_ai_server_time_per_output_token_seconds",
    HISTOGRAM,
    "first token to end, by the tokens after the first, of requests that succeeded",
    GEN_AI,
    When.ENDED,
    GEN_AI_TOKEN_S,
)
GEN_AI_USAGE = Metric(
    "gen_ai_client_token_usage",
    HISTOGRAM,
    "tokens of a request, by `gen_ai_token_type`: `input` or `output`",
    (*GEN_AI, "gen_ai_token_type"),
    When.ENDED,
    GEN_AI_TOKENS,
)

GROUPS = (
    Group(
        "Requests",
        (
            *(REQUESTS, FAILURES, IN_FLIGHT, TTFT, E2E, TIME_PER_TOKEN, OVERHEAD),
            *(PROMPT_TOKENS, CACHED_TOKENS, GENERATED_TOKENS, IGNORED),
        ),
    ),
    Group(
        "Waiting for a slot",
        (
            *(QUEUE_LENGTH, QUEUE_OLDEST, PREDICTED_WAIT, QUEUE_WAIT, WAIT_ERROR, TEAM_QUEUE),
            *(PLACEMENTS, OVERTAKEN),
        ),
    ),
    Group("Trying again", (ATTEMPTS, RETRIES, FALLBACKS, UNKNOWN_MODELS, CIRCUITS_OPENED, CIRCUITS)),
    Group(
        "The fleet",
        (
            WORKERS,
            WORKERS_DRAINING,
            SLOTS,
            SLOTS_BUSY,
            WORKER_STARTS,
            WORKER_LOSSES,
            LEASES,
            LEASES_LOST,
            REFUSED_RECORDS,
        ),
    ),
    Group(
        "The gateway itself",
        (WITHOUT_REDIS, REDIS_UP, REDIS_TIME, UNREADABLE, LOOP_LAG, CONNECTIONS, SOCKETS, BEYOND, STOPPING, BUILD_INFO),
    ),
    Group("By OpenTelemetry's names", (GEN_AI_DURATION, GEN_AI_TTFT, GEN_AI_TOKEN, GEN_AI_USAGE)),
)
