"""Declares every setting of a worker and of the supervisor, and where the value of any Paddock setting comes from.

A value comes from the first of: a flag, a `PADDOCK_*` environment variable, the config file (`--config` names it, or
`PADDOCK_CONFIG`, or it is `<state folder>/config.yaml` if that exists), the default. The gateway's own settings
(`gateway/settings.py`) build on `PaddockSettings`, because one file and one environment configure both. Of
the gateway, only the modules listed in the import contracts (`pyproject.toml`) may import this one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, structs
from pydantic import Field, create_model, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from workers import sources
from workers.models.catalog import CatalogError
from workers.models.spec import ChatDefaults, ModelSpec
from workers.redis.url import checked


class SettingUnusable(ValueError):
    """Raised for an unusable setting that only the worker can check; the message names it and the remedy."""


class PaddockSettings(BaseSettings):
    """Settings of every process of Paddock."""

    # defer_build: there are nine classes of two hundred settings together, and a program reads those of one or two.
    model_config = SettingsConfigDict(
        env_prefix=sources.PREFIX,
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        validate_default=True,
        defer_build=True,
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

    @field_validator("redis_url", "worker_redis_url", check_fields=False)
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


SPEC_FIELDS = {
    field.name: field
    for field in sorted(structs.fields(ModelSpec), key=lambda field: field.name in ChatDefaults.__struct_fields__)
}
"""Name -> field of `ModelSpec`, those of `ChatDefaults` last. `with_spec_fields` makes settings from them."""

NOT_OF_MODELS = frozenset({"name", "path", "hf", "workers", "residency", "gpus", "tags", "price"})
"""`ModelSpec` fields that `ModelSettings` lacks: its `alias` and `model` set two, supervisors or catalogs the rest."""

Settings = TypeVar("Settings", bound=BaseSettings)


EXAMPLES = {
    "llama": """'{"n_batch": 512}'""",
    "sampling": """'{"temperature": 0.7}'""",
    "speculation": """'{"draft": {"path": "small.gguf"}}'""",
    "chat_template_kwargs": """'{"enable_thinking": false}'""",
    "adapters": """'[{"name": "pirate", "path": "pirate.gguf"}]'""",
    "shared_prompts": """'["You are a helpful assistant."]'""",
}
"""Setting whose value is JSON -> a value as a shell takes it."""


def with_spec_fields(*names: str) -> Callable[[type[Settings]], type[Settings]]:
    """Return a decorator that adds to a settings class one setting for each field of `ModelSpec` in `names`.

    Settings for lists and objects take JSON text."""

    def extended(settings_class: type[Settings]) -> type[Settings]:
        fields: dict[str, Any] = {name: _as_setting(SPEC_FIELDS[name]) for name in names}
        name, module, doc = settings_class.__name__, settings_class.__module__, settings_class.__doc__
        return create_model(name, __base__=settings_class, __module__=module, __doc__=doc, **fields)

    return extended


def _as_setting(field: structs.FieldInfo) -> tuple[Any, Any]:
    """Return the type and the default of the setting for a field of a `ModelSpec`."""
    kind, *metas = get_args(field.type)
    said = next((meta.extra["setting"] for meta in metas if meta.extra), metas[0].description)
    if _is_json(kind):
        default = {} if field.default is NODEFAULT else field.default
        return Annotated[str, Field(description=said)], msgspec.json.encode(default).decode()
    # Catalogs also take true and false, since YAML reads a bare `on` or `off` as a bool; a setting's type is the words.
    kind = next((one for one in get_args(kind) if get_origin(one) is Literal), kind)
    bounds = {mark: bound for meta in metas for mark in ("ge", "le") if (bound := getattr(meta, mark)) is not None}
    return Annotated[kind, Field(description=said, **bounds)], field.default


def _is_json(kind: Any) -> bool:
    return get_origin(kind) in (tuple, dict) or (isinstance(kind, type) and issubclass(kind, msgspec.Struct))


@with_spec_fields(*(name for name in SPEC_FIELDS if name not in NOT_OF_MODELS))
class ModelSettings(PaddockSettings):
    """Settings of one model, where there is no catalog file: which it is, how large, how it chats."""

    of_catalog: ClassVar[Collection[str]] = NOT_OF_MODELS
    """Fields that a model has in a catalog, and that are no settings of its own."""

    model: Annotated[Path | None, Field(description="GGUF file to serve")] = None
    alias: Annotated[str, Field(description="name the model is served under; empty: the file's name")] = ""

    @field_validator("thinking", mode="before", check_fields=False)
    @classmethod
    def _word_of_yaml(cls, value: Any) -> Any:
        """Return the thinking mode as a word: YAML reads a bare `on` as true, and a Helm chart makes that a text."""
        return {True: "on", "true": "on", False: "off", "false": "off"}.get(value, value)

    def entry(self, **more: object) -> dict[str, object]:
        """Return these settings, and `more`, as a model's entry in a catalog. Raises CatalogError for bad JSON."""
        return {name: self._value(name) for name in SPEC_FIELDS if name in type(self).model_fields} | more

    def _value(self, name: str) -> object:
        value = getattr(self, name)
        kind = get_args(SPEC_FIELDS[name].type)[0]
        if not _is_json(kind):
            return value
        wanted, word = (list, "list") if get_origin(kind) is tuple else (dict, "object")
        example = f"{word}, such as {EXAMPLES[name]}"
        try:
            document = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise CatalogError(f"{sources.flag(name)}: not valid JSON ({error}); give a JSON {example}") from None
        if not isinstance(document, wanted):
            raise CatalogError(f"{sources.flag(name)}: must be a JSON {example}")
        return document


class EveryWorkerSettings(ModelSettings, CacheSettings):
    """Settings of each worker of a machine, which a supervisor hands on to those that it starts."""

    worker_host: Annotated[str, Field(description="address the worker listens on")] = "127.0.0.1"
    worker_drain_s: Annotated[
        float, Field(ge=0, description="how long a stopping worker lets running calls finish")
    ] = 20.0
    cache_ram_mib: Annotated[
        int,
        Field(
            ge=0,
            le=2**24,
            description="MiB of memory per worker for prompts that left the KV cache, taken as they come; 0: they are "
            "computed anew",
        ),
    ] = 1024
    # A step computes up to 2,048 prompt tokens: 200 s on a CPU that does 10 tokens per second. A step that is ended too
    # early would be tried and ended again for ever. With a GPU no step takes 30 s.
    step_timeout_s: Annotated[
        float,
        Field(
            ge=0,
            description="longest step of a worker's engine, seconds; one that takes longer counts as hung, and the "
            "worker is ended and started again; 0: any length",
        ),
    ] = 300.0
    core_dumps: Annotated[
        bool,
        Field(description="let a worker that crashes leave a core file; it holds prompts, answers and secrets"),
    ] = False
    adapters_dir: Annotated[
        Path | None,
        Field(description="folder that LoRA adapters may be loaded from while a worker runs; unset: none are"),
    ] = None
    max_adapters: Annotated[
        int,
        Field(ge=1, le=256, description="LoRA adapters in a worker's memory; the one used longest ago makes room"),
    ] = 8
    media_cache_mib: Annotated[
        int,
        Field(
            ge=0, le=2**20, description="MiB in a worker's memory for the embeddings of pictures and sounds seen before"
        ),
    ] = 256
    adapters_mib: Annotated[
        int, Field(ge=1, le=2**20, description="MiB that the LoRA adapters in a worker's memory may take together")
    ] = 1024


class WorkerSettings(EveryWorkerSettings):
    """One worker process."""

    worker_id: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9._:/@+-]{0,128}$",
            description="id of this place in the fleet; empty: made from the host's name and process id",
        ),
    ] = ""
    worker_port: Annotated[int, Field(ge=0, le=65535, description="port the worker listens on; 0: any free one")] = 0
    worker_address: Annotated[
        str, Field(description="URL that gateways reach the worker at; empty: http://worker_host:port")
    ] = ""
    workers_on_machine: Annotated[
        int, Field(ge=1, description="workers that share this machine's memory; a supervisor sets it")
    ] = 1
    gateway_grace_s: Annotated[
        float, Field(ge=0, description="how long a worker keeps the calls of a gateway whose stream is gone")
    ] = 5.0
    black_box: Annotated[
        Path | None,
        Field(
            description="file in which a worker keeps the ids of its running requests, for whoever finds it dead: a "
            "supervisor, which sets it, or the next worker; empty: none"
        ),
    ] = None
    model_spec: Annotated[
        Path | None,
        Field(
            description="file with a model's entry of a catalog, as JSON, in place of all settings of the model; a "
            "supervisor sets it"
        ),
    ] = None


@with_spec_fields("gpus")
class SupervisorSettings(EveryWorkerSettings):
    """The supervisor of one machine's workers."""

    catalog: Annotated[Path | None, Field(description="catalog file (YAML or JSON) that names the models to serve")] = (
        None
    )
    hf: Annotated[str, Field(description="model to fetch from the Hugging Face hub, REPO[:QUANT][@REVISION]")] = ""
    models_dir: Annotated[
        Path | None,
        Field(
            description="folder where fetched models are kept, such as a volume that many machines read; unset: `hub` "
            "in the state folder. Where no model is named, `paddock up` and `paddock supervisor` serve all GGUF "
            "models that lie in it"
        ),
    ] = None
    models_mib: Annotated[
        int,
        Field(
            ge=0,
            le=2**30,
            description="most MiB of files in models_dir: a download that would exceed it is refused before it begins; "
            "0: as the disk allows. It does not bound a cache that HF_HOME or HF_HUB_CACHE names",
        ),
    ] = 0
    offline: Annotated[
        bool,
        Field(description="fetch nothing, and serve what is there; HF_HUB_OFFLINE does the same"),
    ] = False
    fetch_timeout_s: Annotated[
        float,
        Field(gt=0, description="longest download of a model; what has come is kept, and the next start goes on there"),
    ] = 7200.0
    load_stall_s: Annotated[
        float,
        Field(
            ge=0,
            description="seconds that a worker may neither compute nor read while it loads a model on demand; then it "
            "counts as hung and is killed; 0: any time",
        ),
    ] = 120.0
    workers: Annotated[int, Field(ge=1, le=256, description="worker processes for the model")] = 2
    fork_workers: Annotated[
        bool,
        Field(
            description="start workers as forks of a process that has loaded the libraries (60 MiB once, a second less "
            "at each start); false: as programs. On Linux"
        ),
    ] = True
    worker_redis_url: Annotated[
        str,
        Field(
            description="redis_url for the workers of `paddock up` or a supervisor, with the login of their own user "
            "(docs/redis.md); empty: redis_url"
        ),
    ] = ""
