"""Turns a configuration file of LiteLLM's proxy into a catalog, and its limits into a file for `paddock apply`.

Source of the format: LiteLLM's pages on its `config.yaml` and on all of its settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.commands.imports.catalog import Imported, Model
from gateway.commands.imports.source import Keys, Source, weights_field

HUB = re.compile(r"(?:hf\.co/|huggingface\.co/)?([^/\s:@]+/[^/\s:@]+)(?::([^/\s:@]+))?$")
LIMITS = {"rpm": "requests_per_minute", "tpm": "tokens_per_minute", "max_parallel_requests": "max_parallel"}
"""Limit of a deployment -> limit of a model name in Paddock."""
SAMPLING = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repeat_penalty", "seed"}
)
LOCAL = frozenset(
    {"ollama", "ollama_chat", "hosted_vllm", "vllm", "lm_studio", "llamafile", "xinference", "huggingface"}
)
"""Providers that are servers of one's own, which have weights that Paddock may serve."""
RATES = {"per_million_prompt": "input_cost_per_token", "per_million_completion": "output_cost_per_token"}
COSTS = frozenset(RATES.values())
MILLION = 1_000_000

INSTEAD: Mapping[str, str] = {
    "master_key": "preset the first key with PADDOCK_API_KEY",
    "database_url": "set PADDOCK_DATABASE_URL",
    "database_connection_pool_limit": "the accounts service has a few connections only",
    "redis_url": "set PADDOCK_REDIS_URL",
    "redis_host": "set PADDOCK_REDIS_URL",
    "redis_port": "set PADDOCK_REDIS_URL",
    "redis_password": "set PADDOCK_REDIS_URL",
    "request_timeout": "set request_timeout_s",
    "timeout": "set request_timeout_s",
    "stream_timeout": "set start_timeout_s",
    "success_callback": "there is a request log, and metrics and traces by OpenTelemetry",
    "failure_callback": "there is a request log, and metrics and traces by OpenTelemetry",
    "callbacks": "there is a request log, and metrics and traces by OpenTelemetry",
    "alerting": "the chart has alerts for Prometheus",
    "cache": "prompts are cached by their beginnings, answers are not",
    "cache_params": "prompts are cached by their beginnings, answers are not",
    "max_budget": "`paddock budgets set`",
    "budget_duration": "`paddock budgets set`",
    "default_team_settings": "`paddock teams update`",
    "global_max_parallel_requests": "slots and the queue bound it; keys and teams have `max_parallel`",
    "max_parallel_requests": "keys, teams and model names have `max_parallel`",
    "context_window_fallbacks": "fallbacks are for models without a place",
    "content_policy_fallbacks": "fallbacks are for models without a place",
    "guardrails": "put them before the gateway",
    "environment_variables": "set them for the process",
    "alerting_threshold": "the chart has alerts for Prometheus",
    "custom_auth": "keys, and single sign-on by OpenID Connect (`oidc`)",
    "ui_username": "`paddock login`",
    "max_tokens": "bound answers by `max_tokens` of a team's or key's limits",
    "api_key": "",
}
UNNEEDED = frozenset(
    {
        *("drop_params", "num_retries", "retry_policy", "allowed_fails", "cooldown_time", "routing_strategy"),
        *("routing_strategy_args", "enable_pre_call_checks", "set_verbose", "json_logs", "store_model_in_db"),
        *("model_info", "api_base", "api_key", "api_version", "custom_llm_provider", "stream", "num_workers"),
        *("disable_cooldowns", "health_check_interval", "background_health_checks", "proxy_batch_write_at"),
        *("telemetry", "force_ipv4", "modify_params", "keep_alive", "redact_user_api_key_info", "order"),
        *("supports_function_calling", "supports_vision", "id", "base_model", "litellm_provider"),
        *("max_input_tokens", "max_output_tokens"),
    }
)
SECTIONS = ("router_settings", "litellm_settings", "general_settings")
READ_SETTINGS = frozenset({"fallbacks", "default_fallbacks", "model_group_alias"})


@dataclass(frozen=True, slots=True)
class Deployment:
    """An entry of `model_list`."""

    keys: Keys
    name: str
    """The name that callers use."""
    upstream: str
    """The model at its provider."""
    kind: str
    """`path` or `hf`, if its weights are known; else empty."""
    weights: str
    weight: float
    entry: dict[str, Any]
    """What else a catalog's entry has."""


def import_litellm(source: Source, sources: Mapping[str, str]) -> Imported:
    """Return the catalog and the limits that a file of LiteLLM makes. `sources`: name or upstream model -> GGUF file or
    model of the hub. Raises Unusable."""
    imported = Imported(source)
    by_name: dict[str, list[Deployment]] = {}
    for place, value in enumerate(source.listing(("model_list",), source.document.get("model_list"))):
        keys: Keys = ("model_list", place)
        if (found := _deployment(imported, keys, source.mapping(keys, value), sources)) is not None:
            by_name.setdefault(found.name, []).append(found)
    fallbacks = {}
    for name, others in _fallbacks(source, by_name):
        for at, other in others:
            if other not in by_name:
                source.note(at, f"{other} is not served by the catalog")
        fallbacks[name] = tuple(other for _, other in others if other in by_name)
    taken: set[str] = set()
    for name, deployments in by_name.items():
        _add(imported, name, deployments, fallbacks.get(name, ()), {*by_name, *taken})
        taken |= {model.entry["name"] for model in imported.models}
    _add_aliases(imported)
    _note_settings(source)
    return imported


def _deployment(imported: Imported, keys: Keys, value: dict[str, Any], sources: Mapping[str, str]) -> Deployment | None:
    """Return an entry whose weights are known; else note what is missing, and return None. Raises Unusable."""
    source, at = imported.source, (*keys, "litellm_params")
    params = source.mapping(at, value.get("litellm_params"))
    name, upstream = value.get("model_name"), params.get("model")
    if not isinstance(name, str) or not isinstance(upstream, str):
        raise source.error(keys, "must have a `model_name` and `litellm_params.model`; add them")
    if "*" in name:
        source.note(
            keys, f"{name}: names with `*` have no counterpart; name each model, or set `unknown_model: default`"
        )
        return None
    _add_limits(imported, name, {**value, **params})
    info_at = (*keys, "model_info")
    info = source.mapping(info_at, value.get("model_info"))
    entry = _extras(source, keys, params, info)
    kind, weights = _weights(upstream, sources.get(name) or sources.get(upstream) or "")
    if not kind:
        provider, where = upstream.partition("/")[0], params.get("api_base", "its provider")
        told = "a server of its own" if provider in LOCAL or "api_base" in params else "a remote provider"
        source.note(
            (*at, "model"),
            f"{upstream} is at {told} ({where}), and the file does not say which GGUF file it is; give --source "
            f"{name}=FILE|OWNER/NAME[:QUANT], or call that server by its own address",
        )
        imported.stubs.append((keys, [f"- name: {name}", "  path: ???  # a GGUF file, or `hf: OWNER/NAME:QUANT`"]))
        return None
    return Deployment(keys, name, upstream, kind, weights, _weight(source, at, params), entry)


def _weights(upstream: str, own: str) -> tuple[str, str]:
    """Return where a model's weights are: `path` or `hf`, and the text for it; two empty texts: that is not known."""
    if own:
        return weights_field(own), own
    model = upstream if upstream.startswith(("hf.co/", "huggingface.co/")) else upstream.partition("/")[2]
    found = HUB.match(model)
    if found is not None and (model.startswith(("hf.co/", "huggingface.co/")) or found[1].lower().endswith("gguf")):
        return "hf", found[1] + (f":{found[2]}" if found[2] else "")
    return "", ""


def _weight(source: Source, at: Keys, params: Mapping[str, Any]) -> float:
    """Return a deployment's share of the calls: as it says, else its limits, as LiteLLM has it."""
    weight = params.get("weight", params.get("rpm", params.get("tpm", 1)))
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight < 0:
        raise source.error((*at, "weight"), f"{weight!r} is no weight; give a number")
    return float(weight)


def _extras(source: Source, keys: Keys, params: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an entry has beside its weights, and note what has no counterpart."""
    entry: dict[str, Any] = {}
    mode = info.get("mode")
    if mode in ("embedding", "rerank"):
        entry["llama"] = {"embeddings": True} if mode == "embedding" else {"pooling": "rank"}
    for parameter in sorted(SAMPLING & params.keys()):
        entry.setdefault("sampling", {})[parameter] = params[parameter]
    costs = {field: {**info, **params}.get(cost) for field, cost in RATES.items()}
    if price := {field: round(cost * MILLION, 9) for field, cost in costs.items() if isinstance(cost, int | float)}:
        entry["price"] = price
    _note_rest(source, (*keys, "litellm_params"), params, SAMPLING | LIMITS.keys() | COSTS | {"model", "weight"})
    _note_rest(source, (*keys, "model_info"), info, COSTS | {"mode"})
    return entry


def _add_limits(imported: Imported, name: str, values: Mapping[str, Any]) -> None:
    """Add a deployment's limits to those of its name: LiteLLM has them per deployment, Paddock for the name."""
    for field, limit in LIMITS.items():
        if isinstance(count := values.get(field), int) and count > 0:
            aliases = imported.access.setdefault("aliases", [])
            alias = next((one for one in aliases if one["name"] == name), None)
            if alias is None:
                aliases.append(alias := {"name": name, "limits": {}})
            alias["limits"][limit] = alias["limits"].get(limit, 0) + count


def _fallbacks(source: Source, known: Mapping[str, Any]) -> Iterator[tuple[str, tuple[tuple[Keys, str], ...]]]:
    """Yield each name and the names that stand in for it, each with its place in the file."""
    listed: dict[str, tuple[tuple[Keys, str], ...]] = {}
    everywhere: tuple[tuple[Keys, str], ...] = ()
    for section in ("litellm_settings", "router_settings"):
        settings = source.mapping((section,), source.document.get(section))
        for place, value in enumerate(source.listing((section, "fallbacks"), settings.get("fallbacks"))):
            at: Keys = (section, "fallbacks", place)
            for name, others in source.mapping(at, value).items():
                if name not in known and name != "*":
                    source.note((*at, name), f"{name} is not served by the catalog")
                listed[name] = _names(source, (*at, name), others)
        at = (section, "default_fallbacks")
        everywhere = _names(source, at, settings.get("default_fallbacks")) or everywhere
    everywhere = listed.get("*", everywhere)
    for name in known:
        others = listed.get(name, tuple(one for one in everywhere if one[1] != name))
        if others:
            yield name, others


def _names(source: Source, keys: Keys, value: Any) -> tuple[tuple[Keys, str], ...]:
    return tuple(((*keys, place), str(name)) for place, name in enumerate(source.listing(keys, value)))


def _add(
    imported: Imported, name: str, deployments: list[Deployment], fallbacks: tuple[str, ...], taken: set[str]
) -> None:
    """Add the models of one name, and a chain where there are several, or others stand in."""
    distinct: dict[str, list[Deployment]] = {}
    for one in deployments:
        distinct.setdefault(one.weights, []).append(one)
    is_chain = len(distinct) > 1 or bool(fallbacks)
    targets: list[dict[str, Any]] = []
    for weights, same in distinct.items():
        model = _free_name(name, same[0].upstream, taken) if is_chain else name
        taken.add(model)
        entry = {"name": model, same[0].kind: weights, **({"workers": len(same)} if len(same) > 1 else {})}
        for one in same:
            entry |= one.entry
        imported.models.append(Model(same[0].keys, entry))
        targets.append({"model": model, "weight": sum(one.weight for one in same)})
    if is_chain:
        only = len(targets) == 1
        imported.aliases[name] = {
            "targets": [target["model"] for target in targets] if only else targets,
            **({"fallbacks": list(fallbacks)} if fallbacks else {}),
        }


def _free_name(name: str, upstream: str, taken: set[str]) -> str:
    """Return a name for a model whose own is that of a chain."""
    last = re.sub(r"[^A-Za-z0-9._-]+", "-", upstream.rpartition("/")[2]).strip("-") or name
    wanted = (last, f"{name}-{last}", *(f"{name}-{number}" for number in range(1, 1000)))
    return next(free for free in wanted if free not in taken)


def _add_aliases(imported: Imported) -> None:
    """Add the further names of models."""
    source, chains = imported.source, dict(imported.aliases)
    settings = source.mapping(("router_settings",), source.document.get("router_settings"))
    at: Keys = ("router_settings", "model_group_alias")
    models = {model.entry["name"] for model in imported.models}
    for alias, value in source.mapping(at, settings.get("model_group_alias")).items():
        name = value.get("model") if isinstance(value, dict) else value
        if name in chains:
            imported.aliases[alias] = chains[name]
        elif name in models:
            imported.aliases[alias] = name
        else:
            source.note((*at, alias), f"{name} is not served by the catalog")


def _note_settings(source: Source) -> None:
    for section in SECTIONS:
        _note_rest(source, (section,), source.mapping((section,), source.document.get(section)), READ_SETTINGS)
    _note_rest(source, (), source.document, frozenset({"model_list", *SECTIONS}))


def _note_rest(source: Source, keys: Keys, part: Mapping[str, Any], read: frozenset[str]) -> None:
    """Note each setting of a part that nothing has read."""
    for name in part:
        if name in read:
            continue
        if name in UNNEEDED:
            source.unneeded.add(name)
        else:
            instead = f"; {INSTEAD[name]}" if INSTEAD.get(name) else ""
            source.note((*keys, name), f"it has no counterpart{instead}")
