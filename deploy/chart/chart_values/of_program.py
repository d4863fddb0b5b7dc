"""The parts of the values that are Paddock's own: its settings and the fields of its catalog, by their own names."""

from __future__ import annotations

import json
from typing import Any

from msgspec.structs import fields

from accounts.settings import AccountsSettings
from chart_values.kinds import Schema
from gateway.settings import GatewaySettings
from workers.models import catalog
from workers.models.spec import ModelSpec
from workers.settings import PaddockSettings, WorkerSettings

OF_CATALOG = tuple(one.name for one in fields(ModelSpec) if one.name not in ("workers", "gpus", "tags"))
"""Fields of a model that its entry in `models` takes. Workers and GPUs are replicas and resources there."""

OF_CHART = frozenset(
    {
        *("config", "state_dir", "redis_url", "worker_secret", "log_format"),
        *("accounts_listen", "accounts_url", "database_url", "gateway_secret"),
        *("host", "port", "gateway_id", "catalog", "api_key", "api_keys", "metrics_key", "oidc", "otlp_headers"),
        "open",
        *("model", "alias", "worker_id", "worker_host", "worker_port", "worker_address", "workers_on_machine"),
        *("cache_dir", "cache_secret", "black_box", "model_spec"),
        *OF_CATALOG,
    }
)
"""Settings that follow from other values, are secrets, or are for one's own machine."""


def settings(of: type[PaddockSettings]) -> Schema:
    """Every setting of a process that an operator may set."""
    found = of.model_json_schema()["properties"]
    return {
        "type": "object",
        "properties": {name: _setting(said) for name, said in sorted(found.items()) if name not in OF_CHART},
        "additionalProperties": False,
    }


def _setting(said: dict[str, Any]) -> Schema:
    """Without the default, which is the program's; what may be unset is left out here."""
    kind = next(iter(said.get("anyOf", [said])))
    kept = ("type", "enum", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "items")
    return {"description": said["description"], **{key: kind[key] for key in kept if key in kind}}


def definitions() -> dict[str, Schema]:
    """What the entries of `models`, and `aliases`, are made of."""
    found = _of_catalog()
    of_llama = ("LlamaSettings", "TensorOverride", "ControlVectorSpec")
    of_alias = ("AliasChain", "Target", "AliasParameters")
    parts = (
        *of_llama,
        "DefaultSampling",
        "SpeculationSettings",
        "DraftSpec",
        "AdapterSpec",
        "Residency",
        "Rates",
        *of_alias,
    )
    return {
        **{name: found[name] for name in parts},
        "accountsSettings": settings(AccountsSettings),
        "gatewaySettings": settings(GatewaySettings),
        "workerSettings": settings(WorkerSettings),
    }


def model_fields() -> dict[str, Schema]:
    found = _of_catalog()["ModelSpec"]["properties"]
    return {name: _given(found[name]) for name in OF_CATALOG}


def aliases() -> Schema:
    found: Schema = _of_catalog()["Catalog"]["properties"]["aliases"]
    return found


def defaults() -> dict[str, Schema]:
    return {name: _given(said) for name, said in _of_catalog()["Defaults"]["properties"].items()}


def _of_catalog() -> dict[str, Schema]:
    """The catalog's own schema, without defaults: an absent value is the program's."""
    text = json.dumps(_without_defaults(catalog.schema()["$defs"]))
    found: dict[str, Schema] = json.loads(text.replace("#/$defs/", "#/definitions/"))
    return found


def _given(said: Schema) -> Schema:
    """A field that may be null is left out instead."""
    return next(iter(said.get("anyOf", [said])))


def _without_defaults(said: Any) -> Any:
    if isinstance(said, dict):
        return {key: _without_defaults(value) for key, value in said.items() if key != "default"}
    return [_without_defaults(value) for value in said] if isinstance(said, list) else said
