"""Resolves the names that callers use to models, from the catalog and from what the fleet serves. Does no I/O.

A call without a model name gets the catalog's default for its job or, without a default, the only model that can do
the job. If a name has several models, all turns of a conversation go to the same one (`gateway.catalog.conversations`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from gateway.call import Principal
from gateway.catalog.conversations import rank_targets
from gateway.catalog.jobs import CANNOT, KIND_OF, Workers, capable_models, default_name, only_model
from gateway.errors import InvalidRequest, ModelNotFound, NotSupported, PermissionDenied, Unavailable
from workers.models.catalog import AliasChain, Catalog, Defaults, Entry, Job
from workers.models.prices import Rates

MAX_NAMES_TOLD = 20

NO_ADAPTERS: Mapping[str, str] = MappingProxyType({})


class ResolvedName(NamedTuple):
    """The name that a call uses, and the model behind this name."""

    name: str
    model: str
    stands_in: bool = False
    """Whether `name` replaces an unknown name that the caller sent: the catalog may let such calls use a default."""


@dataclass(frozen=True, slots=True)
class AliasRules:
    """The parameters of an alias, as `workers.models.alias_parameters` names them and with values as JSON has them."""

    defaults: Mapping[str, Any]
    """Used where a caller does not say."""
    fixed: Mapping[str, Any]
    """Used whatever a caller says."""
    dropped: tuple[str, ...]
    """Names of parameters that are taken out of a caller's request."""


def rules_of(aliases: Mapping[str, Entry]) -> dict[str, AliasRules]:
    """Return alias -> its rules, for those of the catalog's aliases that have some."""
    return {
        name: AliasRules(entry.defaults.values(), entry.set.values(), entry.strip)
        for name, entry in aliases.items()
        if isinstance(entry, AliasChain) and entry.has_parameters
    }


class ModelNames:
    """Maps every name to its model. A model's own name is an alias of itself.

    A model that workers serve has a name even if it is not in the catalog, so that a worker started alone is reachable.
    So has a LoRA adapter (name -> base model), if nothing else has its name. A key that is limited to some names needs
    the adapter's own name among them: the base model's name does not give access to its adapters. A name with several
    models maps to the model of greatest weight; `chain` returns the others too."""

    def __init__(self, catalog: Catalog | None) -> None:
        self.models = frozenset(model.name for model in catalog.models) if catalog is not None else frozenset()
        """Names of the models in the catalog."""
        self.tags = {model.name: model.tags for model in catalog.models} if catalog is not None else {}
        """Model -> its tags in the catalog."""
        self.prices: dict[tuple[str, str], Rates] = {}
        """(model, adapter) -> its price in the catalog; the adapter is empty for the model's own."""
        self.meant = frozenset(model.name for model in catalog.models if model.policy.min) if catalog else frozenset()
        """Models for which the catalog asks for at least one worker at all times."""
        self._defaults = Defaults() if catalog is None else catalog.default
        self._takes_unknown = catalog is not None and catalog.unknown_model == "default"
        self.scales: dict[str, dict[str, float]] = {}
        """Model -> its default adapters and their scales, for calls that name none."""
        for spec in catalog.models if catalog is not None else ():
            priced = {"": spec.price} | {adapter.name: adapter.price for adapter in spec.adapters}
            self.prices |= {(spec.name, adapter): price for adapter, price in priced.items() if price is not None}
            self.scales[spec.name] = {adapter.name: adapter.scale for adapter in spec.adapters if adapter.scale}
        self.aliases = frozenset[str]() if catalog is None else frozenset(catalog.aliases)
        """The catalog's aliases, without the models' own names."""
        self.rules = {} if catalog is None else rules_of(catalog.aliases)
        """Alias -> the parameters that the catalog sets for its calls; only aliases that have some."""
        self._fixed: dict[str, str] = {}
        self._chains: dict[str, AliasChain] = {}
        if catalog is not None:
            self._chains = {name: entry for name, entry in catalog.aliases.items() if isinstance(entry, AliasChain)}
            for name, entry in catalog.aliases.items():
                self._fixed[name] = entry if isinstance(entry, str) else rank_targets(entry.shares(), "")[0]
            self._fixed.update({model.name: model.name for model in catalog.models})

    def all(self, fleet_models: Iterable[str], adapters: Mapping[str, str] = NO_ADAPTERS) -> dict[str, str]:
        """Return name -> model, sorted by name. If several things share a name, the catalog takes precedence, then
        the models of the fleet, then adapters."""
        names = {**adapters, **{model: model for model in fleet_models}, **self._fixed}
        return dict(sorted(names.items()))

    def permitted(
        self, principal: Principal, fleet_models: Iterable[str], adapters: Mapping[str, str] = NO_ADAPTERS
    ) -> dict[str, str]:
        names = self.all(fleet_models, adapters)
        return {name: model for name, model in names.items() if principal.may_use(name)}

    def told_of(
        self, principal: Principal, fleet_models: Iterable[str], adapters: Mapping[str, str] = NO_ADAPTERS
    ) -> frozenset[str] | None:
        """Return the models that a key's holder may be told of: those that it may use by one of their names. None: all
        of them, as for admins."""
        if principal.admin or principal.aliases is None:
            return None
        permitted = self.permitted(principal, fleet_models, adapters)
        return frozenset(permitted.values()).union(*(self.chain(name, "") for name in permitted if self.is_chain(name)))

    def resolve(
        self,
        name: str,
        principal: Principal,
        fleet_models: Iterable[str],
        adapters: Mapping[str, str] = NO_ADAPTERS,
        *,
        complete: bool = True,
    ) -> str:
        """Return the model behind a name. `complete`: whether the gateway has read all models that the fleet serves.

        Raises ModelNotFound for an unknown name (Unavailable if not `complete`), and PermissionDenied. The error lists
        the names that the key may use, except for Unavailable."""
        names = self.all(fleet_models, adapters)
        _check_known(name, names, complete=complete)
        model = names.get(name)
        if model is not None and principal.may_use(name):
            return model
        usable = [other for other in names if principal.may_use(other)]
        if model is None:
            raise ModelNotFound(f"The model {_quote(name)} does not exist. {_list_usable(usable)}", param="model")
        raise PermissionDenied(
            f"This API key may not use the model {_quote(name)}. {_list_usable(usable)}", param="model"
        )

    def resolve_call(
        self,
        name: str,
        principal: Principal,
        fleet_models: Iterable[str],
        adapters: Mapping[str, str] = NO_ADAPTERS,
        workers: Workers = MappingProxyType({}),
        *,
        job: Job | None = None,
        strict: bool = False,
        complete: bool = True,
    ) -> ResolvedName:
        """Return the name and model for a call. `name`: the model name in the call; empty: the call names none.

        `job`: the work that the call asks for; None: it only asks about a model. `strict`: accept only a known name or,
        if the call has none, the only model that there is. Raises what `resolve` raises; without a name also
        InvalidRequest and NotSupported."""
        names = self.all(fleet_models, adapters)
        is_unknown = bool(name) and name not in names
        if name and not (is_unknown and complete and self._takes_unknown and not strict):
            return ResolvedName(name, self.resolve(name, principal, fleet_models, adapters, complete=complete))
        usable = {
            other: model
            for other, model in names.items()
            if principal.may_use(other) and not self.is_adapter(other, fleet_models, adapters)
        }
        own = "" if strict else default_name(self._defaults, job or "chat")
        if own not in usable:
            _check_known(name, names, complete=complete)
            own = _only(usable, workers, job, strict=strict)
        if own:
            return ResolvedName(own, names[own], stands_in=is_unknown)
        if is_unknown:
            return ResolvedName(name, self.resolve(name, principal, fleet_models, adapters))
        raise _missing_model_error(usable, workers, job)

    def is_chain(self, name: str) -> bool:
        return name in self._chains

    def chain(self, name: str, conversation: str) -> tuple[str, ...]:
        """Return the models behind a name of the catalog: first the model for this conversation, then its fallbacks."""
        entry = self._chains.get(name)
        if entry is None:
            return (self._fixed[name],)
        found = list(rank_targets(entry.shares(), conversation))
        for fallback in entry.fallbacks:
            found += (model for model in self.chain(fallback, conversation) if model not in found)
        return tuple(found)

    def is_adapter(self, name: str, fleet_models: Iterable[str], adapters: Mapping[str, str]) -> bool:
        """Return whether a known name is the name of an adapter."""
        return name in adapters and name not in self._fixed and name not in fleet_models


def _check_known(name: str, names: Mapping[str, str], *, complete: bool) -> None:
    """Raise Unavailable if a name is unknown and not all models of the fleet have been read (`complete`)."""
    if not complete and name not in names:
        message = "This gateway has not read yet which models there are. Send the request again."
        raise Unavailable(message)


def _only(usable: Mapping[str, str], workers: Workers, job: Job | None, *, strict: bool) -> str:
    """Return a name of the only model that can do the job or, failing that, of the only model that there is; else "".

    The only model is returned even if it can't do the job, so that the error can say so. `job` None: the call only asks
    about a model; the only one that can chat is preferred. `strict`: return the only model, whatever it can do."""
    models = frozenset(usable.values())
    found = "" if strict else only_model(capable_models(job or "chat", models, workers), workers)
    if not found and (strict or job is None or len(models) == 1):
        found = only_model(models, workers)
    return found if found in usable else next((name for name, model in usable.items() if model == found), "")


def _missing_model_error(
    usable: Mapping[str, str], workers: Workers, job: Job | None
) -> InvalidRequest | ModelNotFound | NotSupported:
    """Return the error for a call without a model name if none can be chosen for it."""
    if not usable:
        return ModelNotFound(f"`model` is missing. {_list_usable([])}", param="model")
    wanted = job or "chat"
    fit = capable_models(wanted, usable.values(), workers)
    if job is None:
        fit = frozenset(usable.values())
    if not fit:
        what = "fill in code" if job == "infill" else CANNOT[KIND_OF[wanted]]
        return NotSupported(
            f"`model` is missing, and no model that this key may use can {what}. {_list_usable(list(usable))}"
        )
    names = [name for name, model in usable.items() if model in fit]
    remedy = f"An operator can name one for such calls, as `default.{wanted}` in the catalog."
    return InvalidRequest(f"`model` is missing. {_list_usable(names)} {remedy}", param="model")


def _quote(name: str) -> str:
    return f"`{name[:128]}`" + ("..." if len(name) > 128 else "")


def _list_usable(usable: list[str]) -> str:
    if not usable:
        return "There is no model that this key may use; ask the operator to start a worker or to widen the key."
    more = len(usable) - MAX_NAMES_TOLD
    rest = f" and {more} more (see GET /v1/models)" if more > 0 else ""
    return "Use one of: " + ", ".join(usable[:MAX_NAMES_TOLD]) + rest + "."
