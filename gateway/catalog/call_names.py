"""Finds the parameters that the catalog sets for the name of a call, before the call's body is checked. Does no I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gateway.call import Principal
from gateway.catalog.jobs import Workers
from gateway.catalog.names import AliasRules, ModelNames
from gateway.errors import InvalidRequest, ModelNotFound, NotSupported, PermissionDenied, Unavailable
from workers.models.catalog import Job


@dataclass(frozen=True, slots=True)
class CallNames:
    """The names that a request's caller may use, from one catalog: it stays the same while the request is answered,
    whichever catalog the gateway reads meanwhile."""

    catalog: ModelNames
    principal: Principal
    fleet_models: Collection[str]
    adapters: Mapping[str, str]
    workers: Workers
    job: Job | None
    is_complete: bool
    """Whether the gateway has read all models that the fleet serves."""
    model: str = ""
    """The name that counts if the body has none; empty: the default's."""

    def rules(self, name: str) -> AliasRules | None:
        """Return the rules of the name that a call will go by; None: there are none, or the call will be refused.

        `name`: the model's name in the body; empty: it has none."""
        found = self.catalog.rules
        if not found:
            return None
        name = name or self.model
        if name in found:
            return found[name] if self.principal.may_use(name) else None
        own = (self.catalog.models, self.catalog.aliases, self.fleet_models, self.adapters)
        if name and any(name in names for names in own):
            return None
        known = (self.fleet_models, self.adapters, self.workers)
        try:
            resolved = self.catalog.resolve_call(name, self.principal, *known, job=self.job, complete=self.is_complete)
        except (InvalidRequest, ModelNotFound, NotSupported, PermissionDenied, Unavailable):
            return None  # `CallResolver` refuses the call with the same error once its body is read
        return found.get(resolved.name)
