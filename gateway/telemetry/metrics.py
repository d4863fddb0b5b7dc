"""The metrics of this gateway process: each is declared here, once, where it is created.

Requests are also counted in OpenTelemetry's metrics for generative AI, under the names that Prometheus gives them.

Source: OpenTelemetry's semantic conventions, generative AI metrics. Attributes have few values: operations of the table
below, names of models that exist, outcomes of `gateway.telemetry.outcomes`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from prometheus_client import CollectorRegistry

from gateway import __version__
from gateway.telemetry.outcomes import FAILED_BY, OTHER, Who, blamed
from gateway.telemetry.request_log import RequestLog
from workers.metrics.types import (
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
    ProcessMetrics,
    When,
)
from workers.tracing.span import PROVIDER

ABOUT = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model")
CHAT, TEXT, EMBEDDINGS, RERANK = "chat", "text_completion", "embeddings", "rerank"

OPERATIONS = {
    "/v1/completions": TEXT,
    "/completion": TEXT,
    "/completions": TEXT,
    "/infill": TEXT,
    "/v1/embeddings": EMBEDDINGS,
    "/embedding": EMBEDDINGS,
    "/embeddings": EMBEDDINGS,
    "/v1/rerank": RERANK,
    "/v1/reranking": RERANK,
    "/rerank": RERANK,
    "/reranking": RERANK,
}
"""Path -> operation; any other path is `chat`. OpenTelemetry's convention has no name for ranking: `rerank` is ours."""


def operation_of(path: str) -> str:
    return OPERATIONS.get(path, CHAT)


class GenAi:
    """OpenTelemetry's four histograms of requests: duration, time to first token, time per token and token usage."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.group = Group("By OpenTelemetry's names", registry)
        self._duration = self.group.histogram(
            "gen_ai_server_request_duration_seconds",
            "arrival to end; `error_type` is empty where the request succeeded",
            (*ABOUT, "error_type"),
            GEN_AI_DURATION_S,
        )
        self._ttft = self.group.histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "arrival to first token, of requests that succeeded",
            ABOUT,
            GEN_AI_TTFT_S,
        )
        self._token = self.group.histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "first token to end, by the tokens after the first, of requests that succeeded",
            ABOUT,
            GEN_AI_TOKEN_S,
        )
        self._usage = self.group.histogram(
            "gen_ai_client_token_usage",
            "tokens of a request, by `gen_ai_token_type`: `input` or `output`",
            (*ABOUT, "gen_ai_token_type"),
            GEN_AI_TOKENS,
        )

    def ended(self, request_log: RequestLog, error: str, total_s: float, token_s: float | None) -> None:
        """Count a request that reached a model. `error`: empty if it succeeded."""
        about = (operation_of(request_log.path), PROVIDER, request_log.alias, request_log.model)
        self._duration.labels(*about, error).observe(total_s)
        if not error and request_log.ttft_s is not None:
            self._ttft.labels(*about).observe(request_log.ttft_s)
        if not error and token_s is not None:
            self._token.labels(*about).observe(token_s)
        if (usage := request_log.usage) is not None:
            self._usage.labels(*about, "input").observe(usage.prompt_tokens)
            self._usage.labels(*about, "output").observe(usage.completion_tokens)


MODEL = ("model",)
USER = ("model", "alias", "team")

OK = "ok"
WATCHED = (
    *((who, code) for code, who in FAILED_BY.items() if who in (Who.WORKER, Who.GATEWAY)),
    (Who.GATEWAY, OTHER),
    *((Who.POLICY, code) for code in ("queue_full", "queue_timeout")),
)
"""Failures that alerts watch: (who is to blame, outcome)."""
LOSSES = DRAINED, LOST = "drained", "lost"
LEASE_ENDS = VOID, CROWDED, EXPIRED = "void", "crowded", "expired"
"""Causes why a lease can end before its call does."""
USAGE_KINDS = ("kept", "held", "dropped", "cut")
REFUSED_KINDS = ("record", "news")
AUTHENTICATION_FAILURES = (
    "missing",
    "invalid_api_key",
    "expired_api_key",
    "token_not_accepted",
    "blocked",
    "network_not_allowed",
    "role_not_allowed",
)
BEYOND_REASONS = ("address", "all", "descriptors")


class Unread(StrEnum):
    """Kinds of Redis keys that other processes write and gateways may find unreadable. Values: patterns of names."""

    MODELS = "pd:models"
    KEYS = "pd:keys"
    SUBJECTS = "{pd:keys}:subjects"
    NEWS = "pd:news"
    GATEWAYS = "pd:gateways"
    RESIDENCY = "pd:residency"
    DEMAND = "pd:demand"
    ASKED = "pd:asked"
    LIBRARY = "pd:library"
    MACHINES = "pd:machines"
    MACHINE_MODELS = "pd:machines:models"
    WORKERS = "pd:{model}:workers"
    WORKER = "pd:{model}:worker"
    HEADS = "pd:{model}:worker:heads"
    ADAPTERS = "pd:{model}:adapters"
    REMOVED = "pd:{model}:adapters-removed"
    SCALES = "pd:{model}:adapter-scales"


class Metrics:
    """All metrics of the process. They are updated once per request, never per token. One thread counts; any thread may
    collect them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        requests, waiting = Group("Requests", registry), Group("Waiting for a slot", registry)
        retries, fleet = Group("Trying again", registry), Group("The fleet", registry)
        usage, own = Group("Usage", registry), Group("The gateway itself", registry)
        self._declare_requests(requests)
        self._declare_refusals(requests)
        self._declare_waiting(waiting)
        self._declare_retries(retries)
        self._declare_fleet(fleet)
        self._declare_usage(usage)
        self._declare_own(own)
        self._gen_ai = GenAi(registry)
        self.process = ProcessMetrics(registry)
        self.groups = (requests, waiting, retries, fleet, usage, own, self._gen_ai.group, self.process.group)
        """The groups of metrics; each is one table of docs/metrics.md."""
        self._announced = set[str]()
        for kind in REFUSED_KINDS:
            self.refused_records.labels(kind)
        for name in Unread:
            self.unreadable.labels(name.value)
        for reason in BEYOND_REASONS:
            self.beyond.labels(reason)
        for reason in AUTHENTICATION_FAILURES:
            self.failed_authentications.labels(reason)
        for result in ("taken", "refused"):
            self.catalog_reads.labels(result)

    def _declare_requests(self, requests: Group) -> None:
        self.requests = requests.counter(
            "paddock_requests_total",
            "requests that ended; `outcome` is `ok`, `client_gone`, `cancelled` or an error's code; `model` and "
            "`alias` are empty where a request never came to one",
            (*USER, "outcome"),
            When.ENDED,
        )
        self.failures = requests.counter(
            "paddock_failures_total",
            "those of them whose `outcome` is not `ok`, by `code`, which is that outcome, and by `who` failed: "
            "`caller`, `policy` (a bound that an operator has set), `worker`, `gateway` (its Redis included)",
            ("model", "who", "code"),
            When.ENDED,
        )
        self.in_flight = requests.gauge(
            "paddock_requests_in_flight",
            "requests between their permission and their end, waiting ones included, by the model that they are with "
            "now",
            MODEL,
            When.HAPPENS,
        )
        self.ttft = requests.histogram("paddock_ttft_seconds", "arrival to first token", MODEL, TTFT_S)
        self.e2e = requests.histogram(
            "paddock_e2e_seconds",
            "arrival to end, however it ended; questions about a model (`input_tokens`, `/tokenize`, `/props`, ...) "
            "are among the requests alone, neither here nor by OpenTelemetry's names",
            MODEL,
            E2E_S,
        )
        self.time_per_token = requests.histogram(
            "paddock_time_per_output_token_seconds",
            "first token to end, by the tokens after the first; of single answers of two tokens and more",
            MODEL,
            GAP_S,
        )
        self.overhead = requests.histogram(
            "paddock_overhead_seconds", "arrival to asking the worker, less the wait for a slot", MODEL, OVERHEAD_S
        )
        self.prompt_tokens = requests.counter(
            "paddock_prompt_tokens_total", "prompt tokens, counted by the worker", USER, When.ENDED
        )
        self.cached_tokens = requests.counter(
            "paddock_cached_tokens_total", "those of them that were in a KV cache", USER, When.ENDED
        )
        self.generated_tokens = requests.counter(
            "paddock_generated_tokens_total",
            "generated tokens, those of answers that were cut off included as far as they came",
            USER,
            When.ENDED,
        )

    def _declare_refusals(self, requests: Group) -> None:
        self.failed_authentications = requests.counter(
            "paddock_failed_authentications_total",
            "requests that were refused for their API key, by `reason`: it is `missing`, or the error's code "
            "(`invalid_api_key` is one that is not known, or no valid token)",
            ("reason",),
            When.HAPPENS,
        )
        self.limited_calls = requests.counter(
            "paddock_limited_total",
            "calls that a `limit` (`requests_per_minute`, `max_parallel`, `budget` ...) has refused, of a subject of "
            "this `kind`: `organisation`, `team`, `user`, `key`, `alias`",
            ("kind", "limit"),
            When.HAPPENS,
        )
        self.ignored = requests.counter(
            "paddock_parameters_ignored_total",
            "requests with a `parameter` that nothing was done with, those that no table names as `unknown`",
            ("parameter",),
            When.ENDED,
        )

    def _declare_waiting(self, waiting: Group) -> None:
        self.queue_length = waiting.gauge(
            "paddock_queue_length",
            "calls of this gateway that wait for a slot, also for a model that has no worker; 0 for a model of the "
            "catalog that nobody calls",
            MODEL,
        )
        self.queue_oldest = waiting.gauge(
            "paddock_queue_oldest_seconds", "how long the one of them that came first has waited", MODEL
        )
        self.predicted_wait = waiting.gauge(
            "paddock_predicted_wait_seconds",
            "how long a call that came now, behind those that wait, would wait for a slot; 0 at a gateway where "
            "nobody waits, though all slots may be busy; of a model without a worker, what the oldest call has waited",
            MODEL,
        )
        self.queue_wait = waiting.histogram(
            "paddock_queue_wait_seconds", "waiting for a slot, all attempts of a request together", MODEL, TTFT_S
        )
        self.wait_error = waiting.histogram(
            "paddock_wait_error_seconds",
            "of requests that had to wait and were asked of one worker: how far the wait that they were told at first "
            "was off, either way",
            MODEL,
            TTFT_S,
        )
        self.team_queue = waiting.counter(
            "paddock_team_queue_seconds_total",
            "the waits of a team's requests, added up; by the rate of its requests: its mean wait",
            ("model", "team"),
            When.ENDED,
        )
        self.placements = waiting.counter(
            "paddock_placements_total",
            "requests that got a slot: `cached` where the worker was expected to have some of the prompt cached, "
            "`uncached` elsewhere",
            ("model", "how"),
            When.ENDED,
        )
        self.overtaken = waiting.counter(
            "paddock_overtaken_total",
            "times that a slot went past a waiting request that wanted it and stood before the one that got it; at "
            "most 8 times each, see [placement.md](placement.md#who-gets-a-freed-slot)",
            MODEL,
            When.ENDED,
        )

    def _declare_retries(self, retries: Group) -> None:
        self.attempts = retries.counter(
            "paddock_attempts_total",
            "submissions to workers: `started`, or the code of the failure that came first",
            ("model", "outcome"),
        )
        self.retries = retries.counter(
            "paddock_retries_total",
            "calls that failed before their first token in a way that another worker can mend: `granted` another try, "
            "or `denied` one because too many of the model's calls are tried again (`retry_share`)",
            ("model", "outcome"),
        )
        self.fallbacks = retries.counter(
            "paddock_fallbacks_total",
            "calls that went from `model` on to another one of their chain: `no_worker` that would do, `wait` (longer "
            "than the caller waits, as predicted), `queue_full`, `queue_timeout`, `model_not_loaded`, `unsuited` (a "
            "model that stood in could not take it)",
            ("model", "fallback", "reason"),
        )
        self.unknown_models = retries.counter(
            "paddock_unknown_models_total",
            "calls for a name that nobody has which went to the catalog's default, `model`, since it lets them "
            "(`unknown_model: default`)",
            MODEL,
        )
        self.circuits_opened = retries.counter(
            "paddock_circuits_opened_total",
            "times that a worker failed several calls in a row and was left alone",
            MODEL,
        )
        self.circuits = retries.gauge("paddock_circuits", "workers that are left alone now", MODEL)

    def _declare_fleet(self, fleet: Group) -> None:
        self.workers = fleet.gauge(
            "paddock_workers", "live workers, draining ones included, as this gateway sees them", MODEL
        )
        self.workers_draining = fleet.gauge("paddock_workers_draining", "those of them that take no new calls", MODEL)
        self.workers_wanted = fleet.gauge(
            "paddock_workers_wanted",
            "workers that supervisors decide that the model should have, of models with `residency`, between its `min` "
            "and `max`: those that there are, and more while calls wait long; also where there is no memory for them",
            MODEL,
        )
        self.slots = fleet.gauge("paddock_slots", "slots of the workers that take calls", MODEL)
        self.slots_busy = fleet.gauge(
            "paddock_slots_busy", "those of them that calls hold, as the workers last said", MODEL
        )
        self.worker_starts = fleet.counter(
            "paddock_worker_starts_total",
            "worker processes that came; not those that were there when the gateway started, nor those that were only "
            "silent for a while",
            MODEL,
        )
        self.worker_losses = fleet.counter(
            "paddock_worker_losses_total", "worker processes that went: `drained` before, or `lost`", ("model", "how")
        )
        self.leases = fleet.gauge("paddock_leases", "slots that calls of this gateway hold", MODEL)
        self.leases_lost = fleet.counter(
            "paddock_leases_lost_total",
            "leases that ended otherwise than by their call: `void` (its worker process is gone) and `crowded` (Redis "
            "had lost it and the slot was taken), told by the gateway that held it; `expired` (nobody renewed it, or "
            "its worker process is gone), told by the gateway that swept it out of Redis",
            ("model", "why"),
        )
        self.refused_records = fleet.counter(
            "paddock_redis_records_refused_total",
            "readings of what stands in Redis and was not written by who may: a worker's `record` or `news` without "
            "the seal of the worker secret; any at all mean a wrong secret or an intruder",
            ("kind",),
        )

    def _declare_usage(self, usage: Group) -> None:
        self.usage_records = usage.counter(
            "paddock_usage_records_total",
            "records of calls: `kept` on disk, `held` in memory because the disk failed, `dropped` because neither had "
            "room; `cut`: found in the journal of a gateway that was killed",
            ("what",),
            When.HAPPENS,
        )
        self.usage_waiting = usage.gauge(
            "paddock_usage_waiting_records", "records of calls that the database does not have yet", (), When.HAPPENS
        )
        self.usage_waiting_s = usage.gauge(
            "paddock_usage_waiting_seconds",
            "how long the database has taken none while some waited; 0 while none waits",
            (),
            When.HAPPENS,
        )
        self.usage_journal_bytes = usage.gauge(
            "paddock_usage_journal_bytes", "bytes of records that wait on disk", (), When.HAPPENS
        )
        self.usage_stream = usage.gauge(
            "paddock_usage_stream_entries",
            "entries of the stream of usage in Redis, of all gateways; at most `paddock_usage_stream_max_entries`",
            (),
            When.HAPPENS,
        )
        self.usage_stream_max = usage.gauge(
            "paddock_usage_stream_max_entries",
            "bound of the stream of usage in Redis (`usage_stream_max`), beyond which records stay on gateways' disks",
            (),
            When.HAPPENS,
        )
        self.usage_set_aside = usage.gauge(
            "paddock_usage_set_aside_entries",
            "entries of usage that could not be written to the database and were set aside in Redis",
            (),
            When.HAPPENS,
        )
        for what in USAGE_KINDS:
            self.usage_records.labels(what)

    def _declare_own(self, own: Group) -> None:
        self.without_redis = own.gauge(
            "paddock_without_redis",
            "1 while calls are placed without Redis, on this gateway's share of the slots",
            MODEL,
        )
        self.redis_up = own.gauge("paddock_redis_up", "1 where Redis took this gateway's last heartbeat")
        self.redis_time = own.histogram(
            "paddock_redis_seconds",
            "asking for a script to be run until its answer, waiting for those asked for before included",
            ("script",),
            REDIS_S,
            When.HAPPENS,
        )
        self.unreadable = own.counter(
            "paddock_redis_unreadable_total",
            "readings that left something out which stands in Redis under `key` and is not as Paddock writes it; the "
            "log names each once. While it stands there, it is met again at each reading",
            ("key",),
        )
        self.loop_lag = own.histogram(
            "paddock_loop_lag_seconds",
            "how late a timer of the event loop fires, five times a second: every stream waits so long",
            (),
            LAG_S,
            When.HAPPENS,
        )
        self.connections = own.gauge("paddock_connections", "connections that are open, WebSockets included")
        self.sockets = own.gauge("paddock_websockets", "WebSockets that are open")
        self.beyond = own.counter(
            "paddock_connections_beyond_total",
            "connections that came beyond a bound, where only probes are answered; `reason` is `address` (of one "
            "address there are as many as there may be), `all` (of all) or `descriptors` (none is left)",
            ("reason",),
        )
        self.catalog_reads = own.counter(
            "paddock_catalog_reads_total",
            "new contents of the catalog's file, by `result`: they are `taken`, or `refused`, and then the catalog "
            "before stays in use",
            ("result",),
            When.HAPPENS,
        )
        self.catalog_refused = own.gauge(
            "paddock_catalog_refused", "1 while the catalog's file can't be used, and an older catalog is in use"
        )
        self.stopping = own.gauge("paddock_stopping", "1 while the gateway takes no new calls because it is to stop")
        own.gauge("paddock_build_info", "1; `version` is Paddock's", ("version",), When.START).labels(__version__).set(
            1
        )

    def note_catalog(self, result: str) -> None:
        """Count new contents of the catalog's file. `result`: `taken` or `refused`."""
        self.catalog_reads.labels(result).inc()
        self.catalog_refused.set(result == "refused")

    def announce(self, models: Iterable[str]) -> None:
        """Create the failure counters of these models, at 0: otherwise a first failure would not show as a rise."""
        for model in models:
            if model in self._announced:
                continue
            self._announced.add(model)
            for who, code in WATCHED:
                self.failures.labels(model, who, code)
            self.worker_starts.labels(model)
            for how in LOSSES:
                self.worker_losses.labels(model, how)
            for why in LEASE_ENDS:
                self.leases_lost.labels(model, why)

    def ended(self, request_log: RequestLog, total_s: float) -> None:
        """Count one request that reached a model; without times and tokens if it only asks about the model."""
        model, outcome = request_log.model, self._outcome(request_log)
        who = (model, request_log.alias, request_log.team)
        self.requests.labels(*who, outcome).inc()
        for parameter in request_log.ignored.labels:
            self.ignored.labels(parameter).inc()
        if request_log.asks_only:
            return
        self.e2e.labels(model).observe(total_s)
        answer = request_log.answer
        if answer.waits:
            queue_s = answer.queue_s
            self.queue_wait.labels(model).observe(queue_s)
            self.team_queue.labels(model, request_log.team).inc(queue_s)
        if answer.attempts:
            self.overhead.labels(model).observe(request_log.overhead_s)
            self._placed(request_log)
        ttft_s, token_s = request_log.ttft_s, None
        if ttft_s is not None:
            self.ttft.labels(model).observe(ttft_s)
        if (usage := request_log.usage) is not None:
            self.prompt_tokens.labels(*who).inc(usage.prompt_tokens)
            self.cached_tokens.labels(*who).inc(usage.cached_tokens)
            self.generated_tokens.labels(*who).inc(usage.completion_tokens)
            # Parallel answers have no common time per token, and one that was cut off may have stalled before.
            is_whole = outcome == OK and len(request_log.answers) == 1
            if ttft_s is not None and usage.completion_tokens > 1 and is_whole:
                token_s = max(0.0, total_s - ttft_s) / (usage.completion_tokens - 1)
                self.time_per_token.labels(model).observe(token_s)
        self._gen_ai.ended(request_log, "" if outcome == OK else outcome, total_s, token_s)

    def turned_away(self, request_log: RequestLog) -> None:
        """Count one request that ended before its model was known: its labels `model` and `alias` are empty."""
        self.requests.labels("", "", request_log.team, self._outcome(request_log)).inc()

    def limited(self, kind: str, limit: str) -> None:
        """Count a call that a limit or budget refused. `kind`: its subject's; `limit`: its name in the records."""
        self.limited_calls.labels(kind, limit).inc()

    def script_took(self, seconds: float, script: str) -> None:
        """Observe the time from asking Redis to run a script until its answer."""
        self.redis_time.labels(script).observe(seconds)

    def lost_leases(self, model: str, why: str, count: int) -> None:
        """Count leases that ended before their calls did. `why`: one of `LEASE_ENDS`."""
        self.leases_lost.labels(model, why).inc(count)

    def _outcome(self, request_log: RequestLog) -> str:
        """Count a failure, and return the request's outcome as one of the declared labels."""
        if request_log.outcome == OK:
            return OK
        who, code = blamed(request_log.outcome)
        self.failures.labels(request_log.model, who, code).inc()
        return code if code == OTHER else request_log.outcome

    def _placed(self, request_log: RequestLog) -> None:
        model, answer = request_log.model, request_log.answer
        self.placements.labels(model, "cached" if answer.attempts[-1].expected_cached else "uncached").inc()
        if answer.overtaken:
            self.overtaken.labels(model).inc(answer.overtaken)
        predicted_s = request_log.queue_position.predicted_s
        if predicted_s is not None and len(answer.attempts) == 1:
            self.wait_error.labels(model).observe(abs(answer.queue_s - predicted_s))
