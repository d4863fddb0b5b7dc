"""Which family a model belongs to: found by its chat template, or named by the catalog."""

from __future__ import annotations

from dataclasses import replace

from workers.chat.reasoning import thought_of
from workers.chat.tools.family import Family
from workers.chat.tools.hermes import HERMES
from workers.chat.tools.plain import PLAIN

FAMILIES = (HERMES, PLAIN)
"""In the order in which templates are tried."""


class FamilyUnknown(ValueError):
    """No family has this name; the message lists those that there are."""


def family_of(template: str, name: str = "") -> Family:
    """The template's family, or the one that is named, with the thoughts that the template speaks of.

    Raises FamilyUnknown.
    """
    family = _named(name) if name else next((family for family in FAMILIES if family.fits(template)), PLAIN)
    return family if family.thought is not None else replace(family, thought=thought_of(template))


def _named(name: str) -> Family:
    found = next((family for family in FAMILIES if family.name == name), None)
    if found is None:
        known = ", ".join(sorted(family.name for family in FAMILIES))
        raise FamilyUnknown(f"tool_family: there is no family {name!r}; use one of: {known}, or leave it out")
    return found
