"""docs/settings.md, made from the settings classes: `paddock config docs > docs/settings.md`."""

from __future__ import annotations

from textwrap import indent

from pydantic_settings import BaseSettings

from gateway.settings import GatewaySettings, UpSettings
from workers import flags, sources
from workers.protocol import exits
from workers.settings import CacheSettings, ModelSettings, PaddockSettings, SupervisorSettings, WorkerSettings

SECTIONS: tuple[tuple[str, type[BaseSettings]], ...] = (
    ("Every process", PaddockSettings),
    ("Which model, and how large", ModelSettings),
    ("Cached prompts on disk", CacheSettings),
    ("Supervisor: `paddock supervisor`, `paddock up`", SupervisorSettings),
    ("Gateway: `paddock gateway`, `paddock up`", GatewaySettings),
    ("Worker: `paddock worker`", WorkerSettings),
    ("`paddock up` alone", UpSettings),
)

HEAD = r"""# Settings

This page is made by `paddock config docs`; a test fails when it is out of date.

A value comes from the first of: a flag, a `PADDOCK_*` environment variable, the config file, the default. An empty
variable counts as unset. The config file is YAML, its keys are setting names (`kv_tokens: 4096`); it is the one named
by `--config` or `PADDOCK_CONFIG`, else `config.yaml` in the state folder where that exists. Paths in it are relative to
it. An unknown key or flag is an error, an unknown `PADDOCK_*` variable a warning; both name the nearest setting.

| command | what it does |
|---|---|
| `paddock up` | a private Redis, this machine's workers and a gateway; takes all settings but a single worker's |
| `paddock gateway` | one gateway process against a given Redis |
| `paddock worker` | one worker process against a given Redis |
| `paddock supervisor` | this machine's workers against a given Redis |
| `paddock fetch` | brings what `catalog` or `hf` names into `models_dir`; prints each model's name and file |
| `paddock chat` | talk to a model in the terminal, or answer what comes in on a pipe; see [client.md](client.md) |
| `paddock drain gateway` (or `worker`) | out of service, nobody refused: [lifecycle.md](lifecycle.md#draining) |
| `paddock bench` | load of many people on any OpenAI-compatible address, and what they see: [bench.md](bench.md) |
| `paddock cache show [--tenant TEAM] [--json]` | files in `cache_dir` and `slot_save_dir`, by version and team |
| `paddock cache erase --tenant TEAM` (or `--all`) | removes a team's files from both, of all versions |
| `paddock key make\|add\|list\|remove` | API keys and their records in Redis: [keys.md](keys.md#in-redis) |
| `paddock redis acl` | users of gateways and workers for a Redis of your own: [redis.md](redis.md#users) |
| `paddock config show [--json]` | each setting of `paddock up`, its value and origin; secrets are covered |
| `paddock config schema` | JSON Schema of a catalog file ([catalog.schema.json](catalog.schema.json)) |
| `paddock config docs` | this page |
| `paddock config compatibility` | what each endpoint does with each parameter: [compatibility.md](compatibility.md) |
| `paddock config metrics` | every metric of gateways and workers: [metrics.md](metrics.md) |

What one model is made of can also be said per model in a [catalog file](catalog.md). On Kubernetes, set
`enableServiceLinks: false` in pods beside a Service named `paddock`: it would set `PADDOCK_PORT`.

More variables are read beside the settings: `PADDOCK_WHEEL_CACHE`, where `make up` keeps the compiled llama.cpp;
`PADDOCK_VENV`, where it makes its environment instead of `.venv`; `PADDOCK_BENCH_DIR`, where benchmarks keep what they
build; and `PADDOCK_DIE_WITH_PARENT`, which a supervisor sets so that its children end when it is killed.
"""

FOLDER = """## The state folder

It is made with mode 0700. A folder that is there already keeps its mode; a warning tells if other users may enter it.

| in it | what it is |
|---|---|
| `first-key` | the first API key, mode 0600, unless one is preset |
| `worker-secret` | the secret that gateways and workers share, mode 0600, made once |
| `gateway-secret` | the secret of gateways alone, mode 0600, made once |
| `cache-secret` | the secret of files in `cache_dir` and `slot_save_dir`, mode 0600, made once |
| `config.yaml` | your settings, if you write it |
| `logs/` | one file per process, each bounded to 3 x 8 MiB |
| `hub/` | fetched models, unless `models_dir` or `HF_HOME` is set; `*.json`: where each lies, its commit and SHA-256 |
| `run/` | lock, Redis socket and users, catalog and address of `paddock up`; `*.calls`: ids of calls in workers |
"""


def settings_page() -> str:
    """Return the whole page, in Markdown."""
    lines = [HEAD]
    told: set[str] = set()
    for title, owner in SECTIONS:
        lines += [f"## {title}", "", "| flag | variable | default | takes | meaning |", "|---|---|---|---|---|"]
        for name, field in owner.model_fields.items():
            if name not in told:
                default = flags.default_text(field)
                value = f"`{default}`" if default else "unset"
                cells = (f"`{flags.flag(name)}`", f"`{sources.variable(name)}`", value, sources.limit(field))
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
