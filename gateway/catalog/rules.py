"""Holds the parameters that the catalog's aliases set for their calls. Does no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.models.catalog import AliasChain, Entry


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
