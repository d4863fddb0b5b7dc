"""Every attack, by area: each module of this folder has a tuple `ATTACKS`."""

from __future__ import annotations

import importlib
import pkgutil

from tests.security.attack import Attack


def all_attacks() -> tuple[Attack, ...]:
    """Return the attacks of all modules of this folder, in the order of their names."""
    found: list[Attack] = []
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        found += importlib.import_module(f"{__name__}.{module.name}").ATTACKS
    return tuple(found)
