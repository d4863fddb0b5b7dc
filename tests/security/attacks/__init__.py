"""Every attack, by area: each module of this folder has a tuple `ATTACKS`."""

from __future__ import annotations

import importlib
import pkgutil

from tests.security.attack import Attack


def attacks_by_area() -> dict[str, tuple[Attack, ...]]:
    """Return the attacks of each module of this folder by its name, in the order of the names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}").ATTACKS for name in names}


def all_attacks() -> tuple[Attack, ...]:
    """Return the attacks of all areas."""
    return tuple(attack for attacks in attacks_by_area().values() for attack in attacks)
