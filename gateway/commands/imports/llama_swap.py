"""Turns a configuration file of llama-swap into a catalog.

Source of the format: `config.example.yaml` of mostlygeek/llama-swap, also that of versions with `groups`.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from gateway.commands.imports.catalog import Imported, Model
from gateway.commands.imports.llama_server import BadOption, read_command
from gateway.commands.imports.options import VARIABLES
from gateway.commands.imports.source import Keys, Source, Unusable, weights_field
from workers.models.generation import DefaultSampling

MACRO = re.compile(r"\$\{([A-Za-z0-9_.-]+)\}")
MAX_DEPTH = 16
MAX_CHARS = 1 << 16
"""Maximum characters of a text once its macros are replaced: each may repeat another one several times."""
PORT = "0"
"""The value of `${PORT}`: a worker takes any free port."""
SWAP_GROUP = "swap"
"""Name of the group of models that are in none: llama-swap has one of these at a time."""
TEAM = "imported"
MOST_PRIORITY = 100
SETTABLE = frozenset(
    {
        *DefaultSampling.__struct_fields__,
        *("max_tokens", "min_tokens", "n", "stop", "ignore_eos", "cache_prompt", "context_shift"),
        *("enable_thinking", "reasoning_effort", "chat_template_kwargs"),
    }
)
"""Parameters that an alias can set."""
DROPPABLE = SETTABLE | {"tools", "tool_choice", "logprobs", "top_logprobs", "logit_bias", "response_format", "priority"}
"""Parameters that an alias can drop."""

NAMED_BESIDE = {
    "enable_thinking": "enable_thinking",
    "thinking": "enable_thinking",
    "reasoning_effort": "reasoning_effort",
}
"""Variable of a chat template -> the parameter that sets it in Paddock."""

INSTEAD: Mapping[str, str] = {
    "healthCheckTimeout": "set start_timeout_s",
    "logLevel": "set log_level",
    "logToStdout": "the log goes to the state folder, warnings to the terminal",
    "apiKeys": "they are in the file of --access, by their hashes",
    "peers": "there is nothing for servers elsewhere; call these by their own address",
    "matrix": "what fits into memory together is in memory together",
    "name": "lists tell the model's name and its `tags`",
    "description": "lists tell the model's name and its `tags`",
    "metadata": "lists tell the model's name and its `tags`",
    "unlisted": "keys can be bound to models by `aliases` of `paddock keys create`",
    "timeouts": "set request_timeout_s and answer_timeout_s",
    "cmdStop": "workers are stopped by SIGTERM",
    "logRequests": "set log_level",
}
UNNEEDED = frozenset(
    {
        *("startPort", "metricsMaxInMemory", "captureBuffer", "logTimeFormat", "includeAliasesInList", "proxy"),
        *("checkEndpoint", "useModelName", "sendLoadingState", "globalTTL", "macros", "hooks", "groups", "models"),
    }
)
READ = frozenset({"cmd", "env", "aliases", "ttl", "filters", "concurrencyLimit", "macros"})


@dataclass(frozen=True, slots=True)
class Filters:
    """Changes of the parameters that callers of a model send."""

    dropped: tuple[str, ...]
    fixed: dict[str, Any]
    by_name: dict[str, dict[str, Any]]
    """Name for the model -> parameters that calls by this name have besides."""

    def chain(self, model: str, name: str) -> dict[str, Any] | str:
        """Return the alias by which a name has these changes, for a model; the model itself if there are none."""
        fixed = self.fixed | self.by_name.get(name, {})
        dropped = [parameter for parameter in self.dropped if parameter not in fixed]
        parts = {**({"strip": dropped} if dropped else {}), **({"set": fixed} if fixed else {})}
        return {"targets": [model], **parts} if parts else model


def import_llama_swap(source: Source, variables: Mapping[str, str], sources: Mapping[str, str]) -> Imported:
    """Return the catalog that a file of llama-swap makes. `variables`: the environment, for `${env.NAME}`; `sources`:
    model -> GGUF file or model of the hub in place of what its command says. Raises Unusable."""
    imported, document = Imported(source), source.document
    macros = source.mapping(("macros",), document.get("macros"))
    for name, value in source.mapping(("models",), document.get("models")).items():
        keys = ("models", name)
        model = source.mapping(keys, value)
        known = _Macros(source, {**macros, **source.mapping((*keys, "macros"), model.get("macros"))}, name, variables)
        if (entry := _entry(imported, keys, name, model, known, sources.get(name, ""))) is not None:
            imported.models.append(Model(keys, entry))
            _add_names(imported, keys, entry, model, _read_filters(source, keys, model, known))
    _add_groups(imported)
    _add_preloads(imported)
    _add_keys(imported, variables)
    _note_rest(source, (), document, frozenset({"models", "groups", "hooks", "macros", "apiKeys", "globalTTL"}))
    return imported


class _Macros:
    """Puts values in place of `${NAME}`."""

    def __init__(self, source: Source, macros: Mapping[str, Any], model: str, variables: Mapping[str, str]) -> None:
        self._source = source
        self._macros = {**macros, "PORT": PORT, "MODEL_ID": model}
        self._variables = variables
        self._values: dict[str, str] = {}
        """Macro -> its value without macros. Worked out once: each may name the next several times."""

    def replaced(self, keys: Keys, text: str, depth: int = 0) -> str:
        """Return a text with the values of its macros. Raises Unusable."""
        if depth > MAX_DEPTH:
            raise self._source.error(keys, "its macros name each other in a circle; take one of them out")

        def value(found: re.Match[str]) -> str:
            name = found[1]
            if name.startswith("env."):
                variable = name.removeprefix("env.")
                if variable not in self._variables:
                    raise self._source.error(keys, f"the variable {variable} is not set; set it, and import again")
                return self._variables[variable]
            if name not in self._macros:
                raise self._source.error(keys, f"there is no macro {name}; add it to `macros`")
            if name not in self._values:
                self._values[name] = self.replaced(keys, str(self._macros[name]), depth + 1)
            return self._values[name]

        parts: list[str] = []
        num_chars = end = 0
        for found in MACRO.finditer(text):
            parts += [text[end : found.start()], value(found)]
            end = found.end()
            num_chars += len(parts[-2]) + len(parts[-1])
            if num_chars > MAX_CHARS:
                raise self._source.error(keys, f"its macros make it longer than {MAX_CHARS} characters; shorten it")
        return "".join([*parts, text[end:]])


def _entry(
    imported: Imported, keys: Keys, name: str, model: dict[str, Any], macros: _Macros, own_source: str
) -> dict[str, Any] | None:
    """Return a model's entry; None if it is no llama-server's. Raises Unusable."""
    source = imported.source
    command = macros.replaced((*keys, "cmd"), str(model.get("cmd") or ""))
    try:
        words = _options(command)
        variables = dict(_variables(source, keys, model, macros))
        reading = read_command([*_from_variables(variables), *(words or ())])
    except (BadOption, ValueError) as error:
        raise source.error((*keys, "cmd"), str(error)) from None
    if words is None and not own_source:
        program = (command.split() or ["nothing"])[0]
        source.note(
            (*keys, "cmd"), f"{program} is no llama-server, which is all that Paddock runs; the model is left out"
        )
        return None
    for lost in reading.lost:
        source.note((*keys, "cmd"), lost)
    source.unneeded |= reading.unneeded
    entry = {"name": name, **reading.entry}
    if own_source:
        entry = {key: value for key, value in entry.items() if key not in ("path", "hf")}
        entry[weights_field(own_source)] = own_source
    if "path" not in entry and "hf" not in entry:
        source.note((*keys, "cmd"), "it names no model (-m or -hf); the model is left out, unless --source names one")
        return None
    _apply_variables(source, keys, variables, entry)
    entry["residency"] = {"min": 0, "max": 1, "ttl_s": _ttl(source, keys, model)}
    if limit := model.get("concurrencyLimit"):
        imported.access.setdefault("aliases", []).append({"name": name, "limits": {"max_parallel": limit}})
        source.note((*keys, "concurrencyLimit"), "it is `max_parallel` in the file of --access; calls wait for slots")
    _note_rest(source, keys, model, READ)
    return entry


def _options(command: str) -> list[str] | None:
    """Return the options of a command line of llama-server; None for another program. Raises ValueError."""
    lines = [line for line in command.splitlines() if not line.lstrip().startswith("#")]
    words = shlex.split(re.sub(r"\\\s*\n", " ", "\n".join(lines)))
    while words and (words[0] == "env" or re.match(r"[A-Z_][A-Z0-9_]*=", words[0])):
        words.pop(0)
    if not words:
        return None
    program = PurePosixPath(words[0].replace("\\", "/")).name
    if re.match(r"(llama|ik_llama)?[-_.]?(cpp-)?server", program):
        return words[1:]
    return _in_container(words[1:]) if program in ("docker", "podman") else None


def _in_container(words: list[str]) -> list[str] | None:
    """Return the options of a llama-server that a container runs, with paths as they are outside of it."""
    image = next((place for place, word in enumerate(words) if re.search(r"llama[._-]?cpp", word)), None)
    if image is None:
        return None
    volumes: dict[str, str] = {}
    for place, word in enumerate(words[:image]):
        if word in ("-v", "--volume"):
            outside, _, rest = words[place + 1].partition(":")
            volumes[rest.partition(":")[0]] = outside
    return [_outside(word, volumes) for word in words[image + 1 :]]


def _outside(word: str, volumes: Mapping[str, str]) -> str:
    inside = next((folder for folder in volumes if word == folder or word.startswith(f"{folder.rstrip('/')}/")), None)
    return word if inside is None else volumes[inside].rstrip("/") + word[len(inside.rstrip("/")) :]


def _variables(source: Source, keys: Keys, model: dict[str, Any], macros: _Macros) -> Iterator[tuple[str, str]]:
    """Yield the names and values of a model's environment."""
    for place, text in enumerate(source.listing((*keys, "env"), model.get("env"))):
        name, _, value = macros.replaced((*keys, "env", place), str(text)).partition("=")
        yield name, value


def _from_variables(variables: Mapping[str, str]) -> list[str]:
    """Return the options that variables stand for."""
    return [word for name, value in variables.items() if name in VARIABLES for word in (VARIABLES[name], value)]


def _apply_variables(source: Source, keys: Keys, variables: Mapping[str, str], entry: dict[str, Any]) -> None:
    for name, value in variables.items():
        if name == "CUDA_VISIBLE_DEVICES" and value in ("", "-1"):
            entry.setdefault("llama", {})["devices"] = ["none"]
        elif name == "CUDA_VISIBLE_DEVICES":
            count = len(value.split(","))
            entry.update({"gpus": max(count, entry.get("gpus", 1))} if count > 1 else {})
            source.note((*keys, "env"), f"{name}: Paddock chooses which GPUs a worker gets; `gpus` says how many")
        elif name not in VARIABLES:
            source.note((*keys, "env"), f"{name} has no counterpart for one model; set it for `paddock up`")


def _read_filters(source: Source, keys: Keys, model: dict[str, Any], macros: _Macros) -> Filters:
    """Return what a model's filters make of its callers' parameters, as far as an alias can do it. Raises Unusable."""
    at = (*keys, "filters")
    filters = source.mapping(at, model.get("filters"))
    dropped: list[str] = []
    for name in ("stripParams", "strip_params"):
        for parameter in re.split(r"[,\s]+", macros.replaced((*at, name), str(filters.get(name) or ""))):
            if parameter in DROPPABLE:
                dropped.append(parameter)
            elif parameter:
                source.note((*at, name), f"{parameter} can't be dropped by an alias; it is left out")
    fixed = {
        parameter: value
        for name in ("setParams", "set_params")
        for parameter, value in _settable(source, (*at, name), filters.get(name)).items()
    }
    by_name = source.mapping((*at, "setParamsByID"), filters.get("setParamsByID"))
    names = {
        macros.replaced((*at, "setParamsByID"), name): _settable(source, (*at, "setParamsByID", name), value)
        for name, value in by_name.items()
    }
    return Filters(tuple(dict.fromkeys(dropped)), fixed, names)


def _settable(source: Source, keys: Keys, value: Any) -> dict[str, Any]:
    """Return the parameters that an alias can set, and note the others. Raises Unusable."""
    found = source.mapping(keys, value)
    for parameter in found.keys() - SETTABLE:
        source.note((*keys, parameter), "an alias can't set it; callers have to send it")
    settable = {parameter: value for parameter, value in found.items() if parameter in SETTABLE}
    variables = source.mapping((*keys, "chat_template_kwargs"), settable.pop("chat_template_kwargs", None))
    settable |= {NAMED_BESIDE[name]: value for name, value in variables.items() if name in NAMED_BESIDE}
    others = {name: value for name, value in variables.items() if name not in NAMED_BESIDE}
    return settable | ({"chat_template_kwargs": others} if others else {})


def _ttl(source: Source, keys: Keys, model: dict[str, Any]) -> int:
    """Return the seconds without a call after which a model leaves; 0: when memory is wanted."""
    ttl = model.get("ttl", -1)
    at: Keys = (*keys, "ttl")
    if ttl == -1:
        ttl, at = source.document.get("globalTTL", 0), ("globalTTL",)
    if isinstance(ttl, bool) or not isinstance(ttl, int) or ttl < 0:
        raise source.error(at, f"{ttl!r} is no number of seconds; correct it")
    return ttl


def _add_names(imported: Imported, keys: Keys, entry: dict[str, Any], model: dict[str, Any], filters: Filters) -> None:
    """Add a model's aliases. If calls by its own name have changed parameters, that name is an alias, too, and the
    model gets another. Raises Unusable."""
    source, name = imported.source, entry["name"]
    at = (*keys, "aliases")
    if filters.chain(name, name) != name:
        entry["name"] = f"{name}-model"
        source.note((*keys, "filters"), f"{name} is an alias that changes parameters, of the model {entry['name']}")
        imported.aliases[name] = filters.chain(entry["name"], name)
    for place, alias in enumerate(source.listing(at, model.get("aliases"))):
        known = alias.get("id") if isinstance(alias, dict) else alias
        if not isinstance(known, str):
            raise source.error((*at, place), "must be a name, or an object with an `id`")
        if known in imported.aliases:
            raise source.error((*at, place), f"{known} is an alias already; remove one of the two")
        imported.aliases[known] = filters.chain(entry["name"], known)
    for known in filters.by_name:
        imported.aliases.setdefault(known, filters.chain(entry["name"], known))
    if imported.aliases.get(name) == name:
        del imported.aliases[name]


def _add_groups(imported: Imported) -> None:
    """Add groups to the catalog, and each model to one. A model of no group is swapped with all others of no group."""
    source, entries = imported.source, {str(model.keys[-1]): model.entry for model in imported.models}
    costs, in_groups = _costs(source), set[str]()
    for name, entry in entries.items():
        entry["residency"].update({"priority": costs[name]} if name in costs else {})
    for group, value in source.mapping(("groups",), source.document.get("groups")).items():
        keys: Keys = ("groups", group)
        told = source.mapping(keys, value)
        swaps, is_exclusive = told.get("swap", True), told.get("exclusive", True)
        members = [str(name) for name in source.listing((*keys, "members"), told.get("members"))]
        group_entry = {**({"at_once": 1} if swaps else {}), **({"exclusive": True} if is_exclusive else {})}
        if group_entry and any(name in entries for name in members):
            imported.groups[group] = group_entry
        for place, name in enumerate(members):
            if name in entries:
                entries[name]["residency"].update({"group": group} if group_entry else {})
                in_groups.add(name)
                _persist(source, keys, told, entries[name])
            elif name not in source.mapping(("models",), source.document.get("models")):
                raise source.error((*keys, "members", place), f"no model is named {name!r}; correct it")
    loose = [entry for name, entry in entries.items() if name not in in_groups]
    if len(loose) > 1 and "matrix" not in source.document:
        imported.groups[SWAP_GROUP] = {"at_once": 1, "exclusive": True}
        for entry in loose:
            entry["residency"]["group"] = SWAP_GROUP
        source.note(
            ("models",),
            f"models of no group are swapped one for another, by the group `{SWAP_GROUP}`; without it as many stay as "
            "fit into memory",
        )


def _persist(source: Source, keys: Keys, told: dict[str, Any], entry: dict[str, Any]) -> None:
    """Keep a model of a persistent group, which other groups don't unload."""
    if not told.get("persistent"):
        return
    residency = entry["residency"]
    if told.get("swap", True) or told.get("exclusive", True) or residency["ttl_s"]:
        residency["priority"] = MOST_PRIORITY
        source.note(
            (*keys, "persistent"), f"{entry['name']} leaves last (`priority`), but is not `pinned`: it has to go"
        )
    else:
        residency["pinned"] = True


def _costs(source: Source) -> dict[str, int]:
    """Return what it costs to lose a model, as a matrix says it: model -> priority."""
    matrix = source.mapping(("matrix",), source.document.get("matrix"))
    names = source.mapping(("matrix", "vars"), matrix.get("vars"))
    costs = source.mapping(("matrix", "evict_costs"), matrix.get("evict_costs"))
    return {str(names[short]): min(int(cost), MOST_PRIORITY) for short, cost in costs.items() if short in names}


def _add_preloads(imported: Imported) -> None:
    source = imported.source
    hooks = source.mapping(("hooks",), source.document.get("hooks"))
    startup = source.mapping(("hooks", "on_startup"), hooks.get("on_startup"))
    names = source.listing(("hooks", "on_startup", "preload"), startup.get("preload"))
    entries = {model.entry["name"]: model.entry for model in imported.models}
    for place, name in enumerate(names):
        known = imported.aliases.get(str(name), str(name))
        known = known["targets"][0] if isinstance(known, dict) else known
        if known in entries:
            entries[known]["residency"]["preload"] = True
        else:
            source.note(("hooks", "on_startup", "preload", place), f"{name} is no model of the catalog")


def _add_keys(imported: Imported, variables: Mapping[str, str]) -> None:
    """Add callers' keys to the access file, by their hashes."""
    source = imported.source
    macros = _Macros(source, {}, "", variables)
    keys = source.listing(("apiKeys",), source.document.get("apiKeys"))
    for place, text in enumerate(keys):
        try:
            key = macros.replaced(("apiKeys", place), str(text))
        except Unusable as error:
            source.note(("apiKeys", place), f"left out: {error}")
            continue
        digest = hashlib.sha256(key.encode()).hexdigest()
        found = {"name": f"{TEAM}-{place + 1}", "team": TEAM, "sha256": digest}
        imported.access.setdefault("teams", [{"name": TEAM}])
        imported.access.setdefault("keys", []).append(found)
    if keys:
        source.note(("apiKeys",), INSTEAD["apiKeys"])


def _note_rest(source: Source, keys: Keys, part: Mapping[str, Any], read: frozenset[str]) -> None:
    """Note each setting of a part that nothing has read."""
    for name in part:
        if name in read:
            continue
        if name in UNNEEDED:
            source.unneeded.add(name)
        else:
            instead = f"; {INSTEAD[name]}" if name in INSTEAD else ""
            source.note((*keys, name), f"it has no counterpart{instead}")
