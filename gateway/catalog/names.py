"""Names to models: pure, from the catalog and from what the fleet serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from gateway.call import Principal
from gateway.catalog.shares import in_order
from gateway.errors import InvalidRequest, ModelNotFound, PermissionDenied, Unavailable
from workers.protocol.catalog import AliasChain, Catalog

MAX_NAMES_TOLD = 20

NO_ADAPTERS: Mapping[str, str] = MappingProxyType({})


class Names:
    """Every name and its model. A model's own name is an alias of itself.

    Models that workers serve without being in the catalog count as well, so that a worker started alone is reachable.
    So do LoRA adapters (name -> model) whose names nothing else has. A key that is limited to some names needs an
    adapter's own name among them: the base model's does not open its adapters.
    A name of several models leads to the heaviest of its targets, and to the others as `chain` says.
    """

    def __init__(self, catalog: Catalog | None) -> None:
        self.models = frozenset(model.name for model in catalog.models) if catalog is not None else frozenset()
        """Those of the catalog."""
        self._fixed: dict[str, str] = {}
        self._chains: dict[str, AliasChain] = {}
        if catalog is not None:
            self._chains = {name: entry for name, entry in catalog.aliases.items() if isinstance(entry, AliasChain)}
            for name, entry in catalog.aliases.items():
                self._fixed[name] = entry if isinstance(entry, str) else in_order(entry.shares(), "")[0]
            self._fixed.update({model.name: model.name for model in catalog.models})

    def all(self, fleet_models: Iterable[str], adapters: Mapping[str, str] = NO_ADAPTERS) -> dict[str, str]:
        """Name -> model, sorted by name; the catalog's word beats the fleet's, and a model's name an adapter's."""
        names = {**adapters, **{model: model for model in fleet_models}, **self._fixed}
        return dict(sorted(names.items()))
        self.meant = frozenset(model.name for model in catalog.models if model.workers) if catalog else frozenset()
        """Those of them that are meant to have a worker."""
        self._defaults = Defaults() if catalog is None else catalog.default
        self._takes_unknown = catalog is not None and catalog.unknown_model == "default"

    def permitted(
        self, principal: Principal, fleet_models: Iterable[str], adapters: Mapping[str, str] = NO_ADAPTERS
    ) -> dict[str, str]:
        names = self.all(fleet_models, adapters)
        return {name: model for name, model in names.items() if principal.may_use(name)}

    def resolve(
        self,
        name: str,
        principal: Principal,
        fleet_models: Iterable[str],
        adapters: Mapping[str, str] = NO_ADAPTERS,
        served: Iterable[str] = (),
        *,
        complete: bool = True,
    ) -> str:
        """The model behind a name; behind none, the only one there is, or of several the only one in `served`.

        `complete`: whether all that the fleet serves is known; a name that is not may be there else, so it is
        Unavailable. Raises ModelNotFound, PermissionDenied or InvalidRequest, each telling the names that would do.
        """
        names = self.all(fleet_models, adapters)
        if not complete and name not in names:
            message = "This gateway has not read yet which models there are. Send the request again."
            raise Unavailable(message, retry_after_s=1.0)
        if not name:
            own = {other: model for other, model in names.items() if not self.is_adapter(other, fleet_models, adapters)}
            return self._only(own, principal, frozenset(served))
        model = names.get(name)
        if model is not None and principal.may_use(name):
            return model
        usable = [other for other in names if principal.may_use(other)]
        if model is None:
            raise ModelNotFound(f"The model {_shown(name)} does not exist. {_told(usable)}", param="model")
        raise PermissionDenied(f"This API key may not use the model {_shown(name)}. {_told(usable)}", param="model")

    def is_chain(self, name: str) -> bool:
        return name in self._chains

    def chain(self, name: str, conversation: str) -> tuple[str, ...]:
        """The models behind a name of the catalog: the one that has this conversation, then its stand-ins."""
        entry = self._chains.get(name)
        if entry is None:
            return (self._fixed[name],)
        found = list(in_order(entry.shares(), conversation))
        for fallback in entry.fallbacks:
            found += (model for model in self.chain(fallback, conversation) if model not in found)
        return tuple(found)

    def is_adapter(self, name: str, fleet_models: Iterable[str], adapters: Mapping[str, str]) -> bool:
        """Whether a name that resolves is an adapter's."""
        return name in adapters and name not in self._fixed and name not in fleet_models

    def _only(self, names: dict[str, str], principal: Principal, served: frozenset[str]) -> str:
        """Return the model of a caller that named none; adapters don't count, since one is only used when it is named.

        Raises InvalidRequest, or ModelNotFound where there is none at all.
        """
        usable = [name for name in names if principal.may_use(name)]
        models = {names[name] for name in usable}
        if len(models) > 1:
            models &= served
        if not usable:
            raise ModelNotFound(f"`model` is missing. {_told(usable)}", param="model")
        if len(models) != 1:
            raise InvalidRequest(f"`model` is missing. {_told(usable)}", param="model")
        return models.pop()


def _shown(name: str) -> str:
    return f"`{name[:128]}`" + ("..." if len(name) > 128 else "")


def _told(usable: list[str]) -> str:
    if not usable:
        return "There is no model that this key may use; ask the operator to start a worker or to widen the key."
    more = len(usable) - MAX_NAMES_TOLD
    rest = f" and {more} more (see GET /v1/models)" if more > 0 else ""
    return "Use one of: " + ", ".join(usable[:MAX_NAMES_TOLD]) + rest + "."
