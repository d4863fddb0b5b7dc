"""`paddock config`: shows the settings and where each comes from, and prints pages that are generated from the code.

show [--json] [flags of up]   each setting of `paddock up`, its value and its source; secrets are hidden
schema                        JSON Schema of a catalog file (published as docs/catalog.schema.json)
docs                          docs/settings.md
compatibility                 docs/compatibility.md: what each endpoint does with each parameter
metrics                       docs/metrics.md: every metric of gateways, workers and the accounts service
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from textwrap import indent
from typing import Any, NoReturn

from prometheus_client import CollectorRegistry
from pydantic_settings import BaseSettings

from accounts.metrics import Metrics as AccountsMetrics
from accounts.settings import AccountsSettings, GatewaySecret
from gateway.settings import GatewaySettings, UpSettings, known_settings
from gateway.telemetry.metrics import Metrics
from workers import sources
from workers.commands import command
from workers.metrics.types import Declaration, Group
from workers.metrics.worker import WorkerMetrics
from workers.models import catalog
from workers.protocol import exits
from workers.settings import (
    CacheSettings,
    EveryWorkerSettings,
    ModelSettings,
    PaddockSettings,
    SupervisorSettings,
    WorkerSettings,
)

SECTIONS: tuple[tuple[str, type[BaseSettings]], ...] = (
    ("Every process", PaddockSettings),
    ("Which model, and how large", ModelSettings),
    ("Cached prompts on disk", CacheSettings),
    ("Each worker: `paddock worker`, `paddock supervisor`, `paddock up`", EveryWorkerSettings),
    ("Supervisor: `paddock supervisor`, `paddock up`", SupervisorSettings),
    ("Gateways and the accounts service", GatewaySecret),
    ("Gateway: `paddock gateway`, `paddock up`", GatewaySettings),
    ("Accounts service: `paddock accounts`, `paddock up`", AccountsSettings),
    ("Worker: `paddock worker`", WorkerSettings),
    ("`paddock up` alone", UpSettings),
)

SETTINGS_HEAD = r"""# Settings

This page is made by `paddock config docs`; a test fails when it is out of date.

A value comes from the first of: a flag, a `PADDOCK_*` environment variable, the config file, the default. An empty
variable counts as unset. The config file is YAML, its keys are setting names (`kv_tokens: 4096`); it is the one named
by `--config` or `PADDOCK_CONFIG`, else `config.yaml` in the state folder where that exists. Paths in it are relative to
it. An unknown key or flag is an error, an unknown `PADDOCK_*` variable a warning; both name the nearest setting.

| command | what it does |
|---|---|
| `paddock up` | a private Redis, this machine's workers and a gateway; takes all settings but a single worker's |
| `paddock gateway` | one gateway process against a given Redis |
| `paddock accounts` | the accounts service against a given Redis and database: [teams.md](teams.md) |
| `paddock worker` | one worker process against a given Redis |
| `paddock supervisor` | this machine's workers against a given Redis |
| `paddock models list` | what lies in `models_dir` and what the catalog names: [library.md](library.md) |
| `paddock models pull [NAME\|REFERENCE ...]` | brings what `catalog` or `hf` names, or these; prints names and files |
| `paddock models show\|verify\|rm` | tells what a file says of itself; checks files; removes them |
| `paddock pull` | the same as `paddock models pull` |
| `paddock status`, `ps`, `top` | what runs; once, briefly, live: [operations.md](operations.md#is-it-well) |
| `paddock stop MODEL` | unloads a model when its calls have ended |
| `paddock restart WORKER` | has a worker finish its calls, and start anew: [api.md](api.md#draining-one-worker) |
| `paddock logs [NAME ...] [-f]` | what the processes of this machine have written |
| `paddock run MODEL [PROMPT]` | a chat with this model, or its answer to a prompt |
| `paddock chat` | talk to a model in the terminal, or answer what comes in on a pipe; see [client.md](client.md) |
| `paddock drain gateway` (or `worker`) | out of service, nobody refused: [lifecycle.md](lifecycle.md#draining) |
| `paddock bench` | load of many people on any OpenAI-compatible address, and what they see: [bench.md](bench.md) |
| `paddock cache show [--tenant TEAM] [--json]` | files in `cache_dir` and `slot_save_dir`, by version and team |
| `paddock cache erase --tenant TEAM` (or `--all`) | removes a team's files from both, of all versions |
| `paddock keys list\|show\|create\|update\|rotate\|block\|unblock\|delete` | API keys: [teams.md](teams.md) |
| `paddock keys make` | a key, and its record for `PADDOCK_API_KEYS`; calls nothing: [keys.md](keys.md#api-keys) |
| `paddock teams\|users\|organisations\|aliases ...` | the same for these, but `rotate` |
| `paddock limits list\|show\|set\|clear` | limits of a team, key, user, organisation or model name |
| `paddock budgets list\|set\|delete` | budgets of the same, and what is spent of them |
| `paddock usage [--by GROUPS]` | sums of calls and costs; `usage calls` lists calls, `usage export` saves them |
| `paddock prices list\|set\|delete\|currency` | what models cost |
| `paddock audit` | who changed what; `audit verify` checks that nothing was altered |
| `paddock apply -f FILE` | teams, keys, limits and budgets as a file declares them; `--dry-run` shows the difference |
| `paddock login`, `paddock logout` | signs in and keeps the key for later commands: [teams.md](teams.md) |
| `paddock completion bash\|zsh\|fish` | prints what makes a shell complete commands and flags |
| `paddock import FILE` | makes a catalog of a file of llama-swap or LiteLLM: [migration.md](migration.md) |
| `paddock redis acl` | users of gateways, supervisors and workers for a Redis of your own: [redis.md](redis.md#users) |
| `paddock config show [--json]` | each setting of `paddock up`, its value and origin; secrets are covered |
| `paddock config schema` | JSON Schema of a catalog file ([catalog.schema.json](catalog.schema.json)) |
| `paddock config docs` | this page |
| `paddock config compatibility` | what each endpoint does with each parameter: [compatibility.md](compatibility.md) |
| `paddock config metrics` | every metric of each kind of process: [metrics.md](metrics.md) |

What one model is made of can also be said per model in a [catalog file](catalog.md). On Kubernetes, set
`enableServiceLinks: false` in pods beside a Service named `paddock`: it would set `PADDOCK_PORT`.

More variables are read beside the settings: `PADDOCK_WHEEL_CACHE`, where `make up` keeps the compiled llama.cpp;
`PADDOCK_VENV`, where it makes its environment instead of `.venv`; `PADDOCK_BENCH_DIR`, where benchmarks keep what they
build; and `PADDOCK_DIE_WITH_PARENT` and `PADDOCK_FORK_SOCKET`, which a supervisor sets so that its children end when it
is killed, and for the process that forks workers.
"""

FOLDER = """## The state folder

It is made with mode 0700. A folder that is there already keeps its mode; a warning tells if other users may enter it.

| in it | what it is |
|---|---|
| `first-key` | the first API key, mode 0600, unless one is preset |
| `logins.json` | keys that `paddock login` keeps, mode 0600 |
| `worker-secret` | the secret that gateways and workers share, mode 0600, made once |
| `gateway-secret` | the secret of gateways alone, mode 0600, made once |
| `cache-secret` | the secret of files in `cache_dir` and `slot_save_dir`, mode 0600, made once |
| `config.yaml` | your settings, if you write it |
| `logs/` | one file per process, each bounded to 3 x 8 MiB |
| `hub/` | fetched models, unless `models_dir` or `HF_HOME` is set; `*.json`: where each lies, its commit and SHA-256 |
| `accounts.sqlite` | teams, keys, budgets and usage, unless `database_url` names another database |
| `run/` | lock, sockets, users of Redis, catalog and address of `paddock up`; of each worker its model and `*.calls` |

What is removed from `run/` while it runs is made again, but for the lock.
"""


def settings_page() -> str:
    """Return docs/settings.md, in Markdown."""
    lines = [SETTINGS_HEAD]
    told: set[str] = set()
    for title, owner in SECTIONS:
        lines += [f"## {title}", "", "| flag | variable | default | takes | meaning |", "|---|---|---|---|---|"]
        for name, field in owner.model_fields.items():
            if name not in told:
                default = sources.default_text(field)
                value = f"`{default}`" if default else "unset"
                cells = (f"`{sources.flag(name)}`", f"`{sources.variable(name)}`", value, sources.limit(field))
                lines.append(f"| {' | '.join(cells)} | {field.description} |")
                told.add(name)
        lines.append("")
    return "\n".join([*lines, FOLDER, _exit_codes()])


def _exit_codes() -> str:
    table = (exits.__doc__ or "").partition("\n\n")[2].strip("\n")
    width = min(len(line) - len(line.lstrip()) for line in table.splitlines() if line)
    plain = "\n".join(line[width:] for line in table.splitlines())
    interrupted = (
        "Ctrl-C before anything was started (while a model is downloaded, say) ends with 130, as in a shell, and "
        "SIGTERM with 143; while a worker reads its model, with 0."
    )
    return f"## Exit codes\n\n{indent(plain, '    ')}\n\n{interrupted}\n"


METRICS_HEAD = """# Metrics

This page is made by `paddock config metrics`; a test fails when it is out of date.

`GET /metrics` of a gateway, of a worker and of the accounts service answers in Prometheus' text format, or in
OpenMetrics where the scraper's `Accept` prefers it, zipped where its `Accept-Encoding` takes that. All come from a
registry of `prometheus_client`. A gateway asks for `metrics_key` where it is set (compose sets it), the others for
nothing. Labels have few values: names of models and aliases that exist, teams of keys, outcomes. There is never a key,
a request id or a caller's text in a label, and a metric keeps at most 20,000 series; what comes after those is counted
under `other`. `team` labels counters only: a histogram by team would be a hundred thousand lines where there are 50
models and 20 teams.

Nothing is counted per token while it streams; a request is counted once, just after its last byte. The page is written
beside the event loop, in slices of less than a millisecond, and scrapes that come together share one page
([performance.md](performance.md#what-a-scrape-costs)). Prometheus finds workers by `GET /metrics/targets` of any
gateway, which answers as `http_sd_configs` reads it: each worker process by its own address, with the labels `model`
and `worker`. Several processes on one host, of gateways or workers, are several targets; none answers for another.

The column "when" says when a value changes: as something happens, when a request has ended, or when somebody scrapes.
"""

GATEWAY = """## Of a gateway

What all gateways see alike, the fleet, is to be taken once: `max by (model)` over `paddock_workers`,
`paddock_workers_draining`, `paddock_workers_wanted`, `paddock_slots`, `paddock_slots_busy`. What is each gateway's own
is to be added up: `sum by (model)` over `paddock_queue_length`, `paddock_requests_in_flight`, `paddock_leases`. Scale
on three of these ([kubernetes.md](kubernetes.md#scaling)): `paddock_requests_in_flight`, in which calls that wait are
included, so that slots don't cap it and workers stay while calls run; `paddock_queue_length` and
`paddock_predicted_wait_seconds`, which bring workers sooner. The latter two have a series for each model of the
catalog before it is first called and while it has no worker.

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

ACCOUNTS = """## Of the accounts service

`GET /metrics` where the service listens (`accounts_listen`): give it `HOST:PORT` for Prometheus to reach it, since a
Unix socket is reached on its own machine only (`curl --unix-socket`). It asks for nothing: let nobody but gateways and
Prometheus reach that port. Where several services run, `paddock_webhooks_pending`, `paddock_ledger_lag_seconds`,
`paddock_ledger_waiting_entries` and the gauges of budgets are the same of each: take the maximum. Alert on a ledger lag
of minutes (the database is away, or too slow) and on `paddock_webhook_tries_total{outcome="given_up"}`.
"""

PROCESS = """## Of each
"""

INTRODUCTIONS = {"By OpenTelemetry's names": GEN_AI}


def gateway_groups() -> tuple[Group, ...]:
    return Metrics(CollectorRegistry()).groups


def worker_groups() -> tuple[Group, ...]:
    return WorkerMetrics(CollectorRegistry(), "", _unread, _unread).groups


def accounts_groups() -> tuple[Group, ...]:
    return AccountsMetrics(CollectorRegistry()).groups


def metrics_of(groups: Iterable[Group]) -> tuple[Declaration, ...]:
    return tuple(metric for group in groups for metric in group.metrics)


def metrics_page() -> str:
    """Return docs/metrics.md, in Markdown."""
    *of_gateway, of_process = gateway_groups()
    *of_worker, _ = worker_groups()
    *of_accounts, _ = accounts_groups()
    return "\n".join(
        [
            METRICS_HEAD,
            GATEWAY,
            *_tables(of_gateway),
            LOG_LINES,
            WORKER,
            *_tables(of_worker),
            ACCOUNTS,
            *_tables(of_accounts),
            PROCESS,
            *_tables((of_process,)),
        ]
    )


def _unread() -> NoReturn:
    raise AssertionError("metrics that are only listed have no values")


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


def main(args: Sequence[str]) -> int:
    name, *rest = args or ["--help"]
    if name == "show":
        return show(rest)
    if name == "schema" and not rest:
        print(schema_text(), end="")
        return 0
    if name == "docs" and not rest:
        print(settings_page(), end="")
        return 0
    if name == "metrics" and not rest:
        print(metrics_page(), end="")
        return 0
    if name == "compatibility" and not rest:
        # The page is made from the whole gateway, which is not installed with a worker alone.
        print(import_module("gateway.api.compatibility").compatibility_page(), end="")
        return 0
    if name in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0
    return command.complain(
        [
            f"config {' '.join(args)}: no such command; use `config show [--json]`, `config schema`, `config docs`, "
            "`config compatibility` or `config metrics`"
        ]
    )


def show(args: Sequence[str]) -> int:
    """Print a line per setting, or with --json one object {setting: {value, source}}. Return the exit code."""
    try:
        reading = sources.read(
            UpSettings, [arg for arg in args if arg != "--json"], prog="paddock config show", known=known_settings()
        )
    except sources.SettingsError as error:
        return command.complain(error.problems)
    for warning in reading.warnings:
        print(f"paddock: warning: {warning}", file=sys.stderr)
    values = {name: sources.masked(name, getattr(reading.settings, name)) for name in UpSettings.model_fields}
    if "--json" in args:
        print(
            json.dumps(
                {name: {"value": value, "source": reading.origins[name]} for name, value in values.items()}, indent=2
            )
        )
        return 0
    names, texts = max(map(len, values)), max(len(_show_value(value)) for value in values.values())
    for name, value in values.items():
        print(f"{name.ljust(names)}  {_show_value(value).ljust(texts)}  {reading.origins[name]}")
    return 0


def schema_text() -> str:
    return json.dumps(_clean(catalog.schema()), indent=2, ensure_ascii=False) + "\n"


def _clean(node: Any) -> Any:
    """Return the schema without the indentation of docstrings, which Python 3.13 removes and older versions keep."""
    if isinstance(node, dict):
        return {name: _clean(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_clean(value) for value in node]
    return inspect.cleandoc(node) if isinstance(node, str) else node


def _show_value(value: object) -> str:
    return "-" if value in (None, "") else str(value)
