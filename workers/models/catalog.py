"""Reads the catalog, a file that lists the models a fleet serves and their names, for the supervisor and for gateways.

A catalog is YAML or JSON. Its JSON Schema is published as `docs/catalog.schema.json` (`paddock config schema`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from workers.models.alias_parameters import DROPPABLE, AliasParameters
from workers.models.catalog_faults import MOST_LOOKED_FOR, faults_of, shown, shown_as_flag, told
from workers.models.cores import cores_of, shares_of
from workers.models.spec import (
    MAX_SHARED_BYTES,
    ModelSpec,
)
from workers.protocol.requests import Name
from workers.protocol.residency import MAX_MODELS
from workers.residency.policy import Group, shared_faults
from workers.yaml_document import YamlInvalid, load_yaml


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model that takes a share of an alias's conversations."""

    model: Name
    weight: Annotated[float, Meta(ge=0, le=1e6, description="share beside the other targets' weights; 0: none")] = 1.0


class AliasChain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A name for several models: some share its conversations, others stand in where these have no place in time. It
    can have parameters of its own, also if it leads to one model only."""

    targets: Annotated[
        tuple[Name | Target, ...],
        Meta(min_length=1, max_length=16, description="models that share the conversations; a bare name weighs 1"),
    ]
    fallbacks: Annotated[
        tuple[Name, ...],
        Meta(max_length=16, description="models and aliases that are tried in turn where no target has a place"),
    ] = ()
    defaults: Annotated[AliasParameters, Meta(description="parameters of calls for the name that do not say")] = (
        AliasParameters()
    )
    set: Annotated[AliasParameters, Meta(description="parameters of all calls for the name, whatever they say")] = (
        AliasParameters()
    )
    strip: Annotated[
        tuple[str, ...],
        Meta(max_length=64, description="parameters that are dropped from calls for the name, under all their names"),
    ] = ()

    @property
    def has_parameters(self) -> bool:
        """Whether calls for the name have other parameters than their callers send."""
        nothing = AliasParameters()
        return bool(self.strip) or self.defaults != nothing or self.set != nothing

    def shares(self) -> tuple[Target, ...]:
        """Return the targets, each with its weight."""
        return tuple(target if isinstance(target, Target) else Target(model=target) for target in self.targets)


Entry = Name | AliasChain

Job = Literal["chat", "embed", "rerank", "infill"]
"""The kinds of work that a call can ask for; `Defaults` has a field for each. `chat`: to continue any text."""


class Defaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Names for calls that name no model, one for each job: of a model, or an alias."""

    chat: (
        Annotated[Name, Meta(description="for any text that is continued, and for questions about a model")] | None
    ) = None
    embed: Annotated[Name, Meta(description="for embeddings")] | None = None
    rerank: Annotated[Name, Meta(description="for the ranking of documents")] | None = None
    infill: Annotated[Name, Meta(description="for code between a prefix and a suffix")] | None = None


class Catalog(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Models and the other names that point at them."""

    models: Annotated[tuple[ModelSpec, ...], Meta(min_length=1)]
    aliases: dict[Name, Entry] = {}
    """Alias -> name of a model, or a chain of several. A model's own name needs no alias."""
    default: Defaults = Defaults()
    """Models and aliases for calls that name no model."""
    unknown_model: Annotated[
        Literal["refuse", "default"],
        Meta(description="what becomes of a call for a name that nobody has; default: it is taken as if it named none"),
    ] = "refuse"
    groups: dict[Name, Group] = {}
    """Name -> what the models that give it as their `residency.group` do to each other and to others."""
    models_max: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="most models that are loaded on a machine at once, as llama-server's `--models-max`; 0: as "
            "many as memory holds",
        ),
    ] = 0


class CatalogError(ValueError):
    """The catalog can't be used; the message names the file, the place in it and the remedy."""


FindFaults = Callable[[Catalog], Iterable[str]]
"""Returns what else is wrong with a catalog, for whoever mends it: such as files that are missing on this machine."""


def no_faults(catalog: Catalog) -> tuple[str, ...]:
    """Find nothing: for whoever checks a catalog by itself."""
    return ()


def check(catalog: Catalog, origin: str, beside: FindFaults = no_faults) -> Catalog:
    """Return the catalog if it keeps the rules that a schema can't express. Raises CatalogError, which tells all that
    it breaks, and what is wrong `beside` that. `origin`: name of the catalog's file for the message."""
    if faults := [*islice(broken_rules(catalog), MOST_LOOKED_FOR)]:
        raise CatalogError(told(f"{origin}: ", [*faults, *beside(catalog)]))
    return catalog


def broken_rules(catalog: Catalog) -> Iterator[str]:
    """Yield what breaks the rules that a schema can't express, each with its place: one source per model, unique names,
    aliases of known models, and so on."""
    if (number := sum(model.residency is not None for model in catalog.models)) > MAX_MODELS:
        yield (
            f"{number:,} models have `residency`, and supervisors can tell gateways of {MAX_MODELS:,}; leave some out, "
            "or serve them by another fleet"
        )
    names: set[str] = set()
    for number, model in enumerate(catalog.models):
        where = f"models[{number}] ({model.name})"
        yield from (f"{where}: {fault}" for fault in _model_faults(model, catalog.groups))
        if model.name in names:
            yield f"{where}: the name is used twice; rename one of the two models"
        names.add(model.name)
    for alias, entry in catalog.aliases.items():
        where = f"aliases.{alias}"
        if alias in names and alias != entry:
            yield f"{where}: a model has this name already; rename the alias"
        if isinstance(entry, str):
            yield from _unknown_model(where, entry, names)
        else:
            yield from _chain_faults(where, alias, entry, names, catalog.aliases)
            yield from _parameter_faults(where, entry)
    policies = {model.name: model.policy for model in catalog.models}
    yield from (f"{place}: {fault}" for place, fault in shared_faults(policies, catalog.groups, catalog.models_max))
    for job, name in msgspec.structs.asdict(catalog.default).items():
        if name is not None and name not in names and name not in catalog.aliases:
            known = _listed({*names, *catalog.aliases})
            yield f"default.{job}: no model or alias is named {name!r}; use one of: {known}"


def _model_faults(model: ModelSpec, groups: Mapping[str, Group]) -> Iterator[str]:
    if (model.path is None) == (model.hf is None):
        yield "give exactly one source: `path` (a GGUF file) or `hf` (REPO[:QUANT][@REVISION])"
    if (wanted := max(len(model.llama.tensor_split), model.llama.main_gpu + 1)) > model.gpus:
        yield f"`llama` speaks of {wanted} GPUs and each worker gets {model.gpus}; raise `gpus`"
    if model.llama.cpus and model.workers and (fault := _core_fault(model)):
        yield f"llama: {fault}"
    if (size := len(msgspec.json.encode(model.shared_prompts))) > MAX_SHARED_BYTES:
        yield (
            f"shared_prompts: the texts take {size:,} bytes as JSON and may take {MAX_SHARED_BYTES:,} together; mark "
            "fewer or shorter ones"
        )
    if model.residency is not None and model.residency.group not in (None, *groups):
        known = f"use one of: {_listed(groups)}" if groups else "the catalog has no `groups`"
        yield f"residency.group: no group is named {model.residency.group!r}; {known}"
    if twice := _first_twice([adapter.name for adapter in model.adapters]):
        yield f"adapters: {twice!r} is named twice; rename one of the two"


def _core_fault(model: ModelSpec) -> str:
    """Return what is wrong unless each of the model's workers gets a core of its own, and one for each of its threads;
    empty: nothing."""
    try:
        least = min(map(len, shares_of(cores_of(model.llama.cpus), model.workers)))
    except ValueError as error:
        return str(error)
    if (threads := max(model.llama.n_threads, model.llama.n_threads_batch)) > least:
        return (
            f"`cpus` gives each of {model.workers} workers {least} cores, and {threads} threads would share them; name "
            "more cores, or lower `n_threads` and `n_threads_batch`"
        )
    return ""


def _unknown_model(where: str, target: str, names: Set[str]) -> Iterator[str]:
    if target not in names:
        yield f"{where}: no model is named {target!r}; use one of: {_listed(names)}"


def _chain_faults(
    where: str, alias: str, chain: AliasChain, names: Set[str], aliases: Mapping[str, Entry]
) -> Iterator[str]:
    shares = chain.shares()
    for number, share in enumerate(shares):
        yield from _unknown_model(f"{where}.targets[{number}]", share.model, names)
    models = [share.model for share in shares]
    if twice := _first_twice(models):
        yield f"{where}.targets: {twice!r} is named twice; give it one entry with the sum of the weights"
    if not any(share.weight for share in shares):
        yield f"{where}.targets: every weight is 0; give one of them a weight above 0"
    if twice := _first_twice(chain.fallbacks):
        yield f"{where}.fallbacks: {twice!r} is named twice; remove one of the two"
    for number, fallback in enumerate(chain.fallbacks):
        at = f"{where}.fallbacks[{number}]"
        if fallback not in names and fallback not in aliases:
            known = _listed({*names, *aliases} - {alias})
            yield f"{at}: no model or alias is named {fallback!r}; use one of: {known}"
        if fallback in models:
            yield f"{at}: {fallback!r} is a target already, and targets stand in for each other; remove it"
        if path := _way_back(fallback, alias, aliases):
            yield f"{at}: this leads back to {alias!r} ({' -> '.join((alias, *path))}); remove one of these"


def _parameter_faults(where: str, chain: AliasChain) -> Iterator[str]:
    for name in chain.strip:
        if name not in DROPPABLE:
            close = difflib.get_close_matches(name, DROPPABLE, n=1)
            remedy = f"did you mean `{close[0]}`?" if close else f"use some of: {_listed(DROPPABLE)}"
            yield f"{where}.strip: {name!r} is no parameter that can be dropped; {remedy}"
    if twice := _first_twice(chain.strip):
        yield f"{where}.strip: {twice!r} is named twice; remove one of the two"
    fixed = chain.set.values()
    # Variables of chat templates stand each for itself, so both may have some.
    for name in sorted(fixed.keys() & chain.defaults.values().keys() - {"chat_template_kwargs"}):
        yield f"{where}.defaults: {name!r} has a value in `set` too, which counts in any case; remove one of the two"


def _way_back(name: str, alias: str, aliases: Mapping[str, Entry], seen: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the chain of fallbacks from `name` to `alias`, both included; empty: no chain leads to `alias`."""
    if name == alias:
        return (*seen, name)
    entry = aliases.get(name)
    if not isinstance(entry, AliasChain) or name in seen:
        return ()
    ways = (_way_back(fallback, alias, aliases, (*seen, name)) for fallback in entry.fallbacks)
    return next((way for way in ways if way), ())


def _first_twice(names: Sequence[str]) -> str:
    return next((name for name in names if names.count(name) > 1), "")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def load(path: Path, beside: FindFaults = no_faults) -> Catalog:
    """Return the checked catalog of a YAML or JSON file. Raises CatalogError."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CatalogError(f"{path}: {error.strerror}; --catalog must name a readable file") from None
    return parse(raw, path, beside)


def parse(raw: bytes, path: Path, beside: FindFaults = no_faults) -> Catalog:
    """Return the checked catalog in the contents of the file `path`. Raises CatalogError."""
    try:
        document = load_yaml(raw.decode())
    except (YamlInvalid, UnicodeDecodeError) as error:
        raise CatalogError(f"{path}: not valid YAML or JSON: {error}") from None
    return convert(document, str(path), beside)


def convert(document: Any, origin: str, beside: FindFaults = no_faults) -> Catalog:
    """Return the checked catalog of a parsed YAML or JSON document. Raises CatalogError, which tells all faults of the
    document's form, or once there are none, all rules that it breaks, and what is wrong `beside` these."""
    try:
        catalog = msgspec.convert(document, Catalog)
    except msgspec.ValidationError as error:
        found = faults_of(document, Catalog, NAMED_BY_KEYS)
        faults = [shown_as_flag(fault) if origin == SETTINGS else shown(fault, document) for fault in found]
        place = "" if origin == SETTINGS else f"{origin}: "
        text = told(place, faults or [str(error)])
        raise CatalogError(f"{text}; see docs/catalog.md for what each field takes") from None
    return check(catalog, origin, beside)


SETTINGS = "settings"
"""The origin of a catalog with one model, which is made of settings."""
NAMED_BY_KEYS: Mapping[str, Any] = {"aliases": Entry, "groups": Group}
"""Fields that are mappings -> the type of their values."""


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a catalog file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Paddock catalog",
        **msgspec.json.schema(Catalog),
    }
