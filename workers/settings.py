"""Declares every setting of a worker and of the supervisor, and where the value of any Paddock setting comes from.

A value comes from the first of: a flag, a `PADDOCK_*` environment variable, the config file (`--config`, else
`PADDOCK_CONFIG`, else `<state folder>/config.yaml` where that exists), the default. The gateway's own settings
(`gateway/settings.py`) build on `PaddockSettings`; this module is the one exception to "gateways import
`workers.protocol` only", because one file and one environment configure both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from workers import sources
from workers.protocol.catalog import MAX_CTX, MAX_KV_TOKENS, MAX_SLOTS, ThinkingMode
from workers.protocol.requests import MAX_BUDGET_MESSAGE_CHARS, MAX_THINKING_BUDGET
from workers.redis_url import checked


class PaddockSettings(BaseSettings):
    """What every process of Paddock needs."""

    model_config = SettingsConfigDict(
        env_prefix=sources.PREFIX, env_ignore_empty=True, extra="ignore", frozen=True, validate_default=True
    )

    config: Annotated[Path | None, Field(description="config file (YAML), its keys are setting names")] = None
    state_dir: Annotated[Path, Field(description="folder for keys, sockets, logs and downloaded models")] = Path(
        "~/.paddock"
    )
    redis_url: Annotated[
        str,
        Field(
            description="Redis to use: a server, Sentinels or a Cluster, with TLS or without (docs/redis.md); empty: "
            "`paddock up` starts a private one on a Unix socket"
        ),
    ] = ""
    redis_wait_s: Annotated[
        float, Field(ge=0, description="how long a starting gateway or worker waits for Redis to answer")
    ] = 60.0
    worker_secret: Annotated[
        str, Field(description="secret that gateways and workers share; empty: `paddock up` makes one")
    ] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Field(description="least severe log line; `paddock up`'s terminal shows warnings only, unless this is given"),
    ] = "info"
    log_format: Annotated[
        Literal["auto", "text", "json"],
        Field(description="auto: text on a terminal, else JSON; for what `paddock up` prints, auto is always text"),
    ] = "auto"
    otlp_endpoint: Annotated[
        str,
        Field(
            description="URL of a collector that takes traces by OTLP over HTTP, such as http://127.0.0.1:4318; empty: "
            "what OTEL_EXPORTER_OTLP_ENDPOINT says, else there are no traces (docs/tracing.md)"
        ),
    ] = ""
    otlp_headers: Annotated[
        str, Field(description="headers for the collector, name=value with commas between; values percent-encoded")
    ] = ""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, sources.ConfigFile(settings_cls)

    @field_validator("*", mode="before")
    @classmethod
    def _text_of_structures(cls, value: Any) -> Any:
        """Turn structures into JSON text: a config file may write `llama: {n_batch: 512}`, a flag must write JSON."""
        return sources.json_text(value)

    @field_validator("redis_url")
    @classmethod
    def _whole_redis_url(cls, value: str) -> str:
        if value:
            checked(value)
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _home_of_paths(cls, value: Any) -> Any:
        return value.expanduser() if isinstance(value, Path) else value


class CacheSettings(PaddockSettings):
    """Cached prompts on disk."""

    cache_dir: Annotated[
        Path | None,
        Field(
            description="folder where workers keep the KV of prompts beyond a restart, of this user's own; several "
            "workers may share it, on one machine or on a volume; unset: none is kept on disk"
        ),
    ] = None
    cache_disk_mib: Annotated[int, Field(ge=1, description="most MiB of files in cache_dir, all workers' together")] = (
        10240
    )
    cache_secret: Annotated[
        str,
        Field(
            description="secret that names and seals the files in cache_dir and slot_save_dir, for workers on several "
            "machines that share them; empty: one is made in the state folder. With another no file of before is found"
        ),
    ] = ""
    slot_save_dir: Annotated[
        Path | None,
        Field(description="folder for slots that are saved by name (`/slots/{id}?action=save`); unset: none can be"),
    ] = None
    slot_save_mib: Annotated[
        int, Field(ge=1, description="most MiB of files in slot_save_dir, all teams' together")
    ] = 10240
    slot_save_mib_per_team: Annotated[int, Field(ge=1, description="most MiB of one team's files in slot_save_dir")] = (
        4096
    )
    slot_saves_per_team: Annotated[
        int, Field(ge=1, le=10_000, description="most files of one team in slot_save_dir")
    ] = 256


class ModelSettings(PaddockSettings):
    """What says which model to serve and how large, when there is no catalog file."""

    model: Annotated[Path | None, Field(description="GGUF file to serve")] = None
    alias: Annotated[str, Field(description="name the model is served under; empty: the file's name")] = ""
    slots: Annotated[int, Field(ge=1, le=MAX_SLOTS, description="conversations at once, per worker")] = 8
    ctx: Annotated[
        int,
        Field(ge=0, le=MAX_CTX, description="longest single conversation, tokens; 0: what the model was trained for"),
    ] = 0
    kv_tokens: Annotated[
        int,
        Field(
            ge=0, le=MAX_KV_TOKENS, description="KV cells that all slots share; 0: slots x ctx, reduced to fit memory"
        ),
    ] = 0
    llama: Annotated[
        str, Field(description="JSON object of llama.cpp settings, fields as in the catalog's `llama`")
    ] = "{}"
    sampling: Annotated[
        str, Field(description="JSON object of default sampling, fields as in the catalog's `sampling`")
    ] = "{}"
    adapters: Annotated[
        str,
        Field(description="JSON list of LoRA adapters, known from the start; fields as in the catalog's `adapters`"),
    ] = "[]"
    tool_family: Annotated[
        str,
        Field(
            description="form of the model's tool calls and thoughts, a name of docs/tool-calls.md; empty: found by "
            "its chat template"
        ),
    ] = ""
    open_objects: Annotated[
        bool,
        Field(
            description="objects of a schema that does not say which other keys there may be go on after the keys that "
            "it lists; off: they end there, as llama-server's do"
        ),
    ] = False
    chat_template: Annotated[
        str,
        Field(
            description="Jinja file, the template itself, or a name that llama-server takes, such as chatml, in place "
            "of the model's own; empty: the model's own"
        ),
    ] = ""
    thinking: Annotated[
        ThinkingMode,
        Field(description="whether the model thinks where a caller does not say; auto: as llama-server has it"),
    ] = "auto"
    thinking_budget: Annotated[
        int,
        Field(
            ge=-1,
            le=MAX_THINKING_BUDGET,
            description="most tokens of thought where a caller does not say, then it is closed for the model; -1: no "
            "bound; 0: at once",
        ),
    ] = -1
    thinking_budget_message: Annotated[
        str,
        Field(
            max_length=MAX_BUDGET_MESSAGE_CHARS,
            description="what the model is made to say before its thought is closed at the budget, where a caller does "
            "not say",
        ),
    ] = ""
    chat_template_kwargs: Annotated[
        str,
        Field(description="JSON object of variables for the chat template, where a caller does not set them"),
    ] = "{}"
    shared_prompts: Annotated[
        str,
        Field(description="JSON list of system prompts that teams share cached, as in the catalog's `shared_prompts`"),
    ] = "[]"

    @field_validator("thinking", mode="before")
    @classmethod
    def _word_of_yaml(cls, value: Any) -> Any:
        """Return the mode as a word: YAML takes a bare `on` for true, and a chart writes that as text."""
        return {True: "on", "true": "on", False: "off", "false": "off"}.get(value, value)


AdaptersDir = Annotated[
    Path | None,
    Field(description="folder that LoRA adapters may be loaded from while a worker runs; unset: none are"),
]
MaxAdapters = Annotated[
    int,
    Field(ge=1, le=256, description="LoRA adapters in a worker's memory; the one used longest ago makes room"),
]
MAX_ADAPTERS = 8
AdaptersMib = Annotated[
    int, Field(ge=1, le=2**20, description="MiB that the LoRA adapters in a worker's memory may take together")
]
ADAPTERS_MIB = 1024

CacheRamMib = Annotated[
    int,
    Field(
        ge=0,
        le=2**24,
        description="MiB of memory per worker for prompts that left the KV cache, taken as they come; 0: they are "
        "computed anew",
    ),
]
CACHE_RAM_MIB = 1024

StepTimeout = Annotated[
    float,
    Field(
        ge=0,
        description="longest step of a worker's engine, seconds; one that takes longer counts as hung, and the worker "
        "is ended and started again; 0: any length",
    ),
]
STEP_TIMEOUT_S = 300.0
"""Default bound on a step, seconds. A step computes up to 2,048 prompt tokens: 200 s on a CPU that does 10 tokens per
second. Ended too early, it would be tried and ended again for ever. With a GPU no step takes 30 s."""

CoreDumps = Annotated[
    bool, Field(description="let a worker that crashes leave a core file; it holds prompts, answers and secrets")
]


class WorkerSettings(ModelSettings, CacheSettings):
    """One worker process."""

    worker_id: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9._:/@+-]{0,128}$",
            description="id of this place in the fleet; empty: made from the host's name and process id",
        ),
    ] = ""
    worker_host: Annotated[str, Field(description="address the worker listens on")] = "127.0.0.1"
    worker_port: Annotated[int, Field(ge=0, le=65535, description="port the worker listens on; 0: any free one")] = 0
    worker_address: Annotated[
        str, Field(description="URL that gateways reach the worker at; empty: http://worker_host:port")
    ] = ""
    worker_drain_s: Annotated[
        float, Field(ge=0, description="how long a stopping worker lets running calls finish")
    ] = 20.0
    workers_on_machine: Annotated[
        int, Field(ge=1, description="workers that share this machine's memory; a supervisor sets it")
    ] = 1
    gateway_grace_s: Annotated[
        float, Field(ge=0, description="how long a worker keeps the calls of a gateway whose stream is gone")
    ] = 5.0
    cache_ram_mib: CacheRamMib = CACHE_RAM_MIB
    step_timeout_s: StepTimeout = STEP_TIMEOUT_S
    core_dumps: CoreDumps = False
    adapters_dir: AdaptersDir = None
    max_adapters: MaxAdapters = MAX_ADAPTERS
    adapters_mib: AdaptersMib = ADAPTERS_MIB
    black_box: Annotated[
        Path | None,
        Field(
            description="file in which a worker keeps the ids of its running requests, for whoever finds it dead: a "
            "supervisor, which sets it, or the next worker; empty: none"
        ),
    ] = None


class SupervisorSettings(ModelSettings, CacheSettings):
    """The supervisor of one machine's workers."""

    catalog: Annotated[Path | None, Field(description="catalog file (YAML or JSON) that names the models to serve")] = (
        None
    )
    hf: Annotated[str, Field(description="model to fetch from the Hugging Face hub, REPO[:QUANT][@REVISION]")] = ""
    models_dir: Annotated[
        Path | None,
        Field(
            description="folder where fetched models are kept, such as a volume that many machines read; unset: `hub` "
            "in the state folder"
        ),
    ] = None
    fetch_timeout_s: Annotated[
        float,
        Field(gt=0, description="longest download of a model; what has come is kept, and the next start goes on there"),
    ] = 7200.0
    workers: Annotated[int, Field(ge=1, le=256, description="worker processes for the model")] = 2
    gpus: Annotated[int, Field(ge=1, le=16, description="GPUs that each worker gets, where `nvidia-smi` finds any")] = 1
    worker_host: Annotated[str, Field(description="address the workers listen on")] = "127.0.0.1"
    worker_drain_s: Annotated[
        float, Field(ge=0, description="how long a stopping worker lets running calls finish")
    ] = 20.0
    cache_ram_mib: CacheRamMib = CACHE_RAM_MIB
    step_timeout_s: StepTimeout = STEP_TIMEOUT_S
    core_dumps: CoreDumps = False
    adapters_dir: AdaptersDir = None
    max_adapters: MaxAdapters = MAX_ADAPTERS
    adapters_mib: AdaptersMib = ADAPTERS_MIB
