"""docs/metrics.md, made from the catalogue: `paddock config metrics > docs/metrics.md`."""

from __future__ import annotations

from collections.abc import Iterable

from workers.protocol.metrics import of_gateway, of_process, of_worker
from workers.protocol.metrics.metric import Group

HEAD = """# Metrics

This page is made by `paddock config metrics`; a test fails when it is out of date.

`GET /metrics` of a gateway and of a worker answers in Prometheus' text format. A gateway asks
for `metrics_key` where it is set (compose sets it), a worker for nothing. Labels have few values:
names of models and aliases that exist, teams of keys, outcomes. There is never a key, a request id or a caller's text
in a label, and a metric keeps at most 20,000 series; what comes after those is counted under `other`. `team` labels
counters only: a histogram by team would be a hundred thousand lines where there are 50 models and 20 teams.

Nothing is counted per token while it streams; a request is counted once, just after its last byte. A scrape is rendered
beside the event loop, in slices of less than a millisecond, and scrapes that come together share one page
([performance.md](performance.md#what-a-scrape-costs)). Prometheus finds workers by `GET /metrics/targets` of any
gateway, which answers as `http_sd_configs` reads it: each worker process by its own address, with the labels `model`
and `worker`. Several processes on one host, of gateways or workers, are several targets; none answers for another.

The column "when" says when a value changes: as something happens, when a request has ended, or when somebody scrapes.
"""

GATEWAY = """## Of a gateway

What all gateways see alike, the fleet, is to be taken once: `max by (model)` over `paddock_workers`,
`paddock_workers_draining`, `paddock_slots`, `paddock_slots_busy`. What is each gateway's own is to be added up:
`sum by (model)` over `paddock_queue_length`, `paddock_requests_in_flight`, `paddock_leases`. Scale on three of these
([kubernetes.md](kubernetes.md#scaling)): `paddock_requests_in_flight`, in which calls that wait are included, so that
slots don't cap it and workers stay while calls run; `paddock_queue_length` and `paddock_predicted_wait_seconds`, which
bring workers sooner. The latter two have a series for each model of the catalog before it is first called and while it
has no worker.

`paddock_placements_total` tells what was expected, `paddock_cached_tokens_total` what was found: where the first says
`cached` and the second stays low, workers lose prefixes sooner than they tell.

The buckets of the histograms of waiting are vLLM's, so that quantiles compare.
"""

GEN_AI = """The names of OpenTelemetry's conventions for generative AI as Prometheus exports them, with the buckets that
those advise. `gen_ai_request_model` is the alias that a call came to, `gen_ai_response_model` the model,
`gen_ai_provider_name` is `paddock`, `gen_ai_operation_name` `chat`, `text_completion`, `embeddings` or `rerank`.
Requests that never came to a model are not in them.
"""

LOG_LINES = """Each request also leaves one log line with its id, team, key id, alias, model, worker, status, outcome,
attempts and times.
"""

WORKER = """## Of a worker

The names are llama-server's and vLLM's where they have one, with their meaning and buckets, so that existing boards,
scalers and endpoint pickers work: the Gateway API inference extension reads `vllm:num_requests_waiting`,
`vllm:num_requests_running`, `vllm:kv_cache_usage_perc`, `vllm:lora_requests_info` and `vllm:cache_config_info`. The set
is always the same: what a worker does not have, a disk tier for one, is zero. What the engine counts is read when
somebody scrapes and costs a step a microsecond or two.
"""

PROCESS = """## Of either
"""

INTRODUCTIONS = {"By OpenTelemetry's names": GEN_AI}


def metrics_page() -> str:
    """Return the whole page, in Markdown."""
    return "\n".join(
        [
            HEAD,
            GATEWAY,
            *_tables(of_gateway.GROUPS),
            LOG_LINES,
            WORKER,
            *_tables(of_worker.GROUPS),
            PROCESS,
            *_tables((of_process.GROUP,)),
        ]
    )


def _tables(groups: Iterable[Group]) -> Iterable[str]:
    for group in groups:
        yield f"### {group.title}\n"
        if group.title in INTRODUCTIONS:
            yield INTRODUCTIONS[group.title]
        yield "| metric | type | labels | when | what it says |\n|---|---|---|---|---|"
        for metric in group.metrics:
            labels = " ".join(f"`{label}`" for label in metric.labels)
            yield f"| `{metric.name}` | {metric.kind} | {labels} | {metric.set_when} | {metric.help} |"
        yield ""
