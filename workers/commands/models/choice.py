"""Finds the listed items that names on a command line stand for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from workers.commands.models.inventory import Item
from workers.commands.models.parser import Unusable
from workers.sources import nearest


def chosen(items: Sequence[Item], names: Iterable[str], command: str) -> tuple[Item, ...]:
    """Return the items of these names, each once: references, names of the catalog's models, or files, as `models
    list` names them. Raises Unusable."""
    return tuple({item.name: item for name in names for item in _of(items, name, command)}.values())


def _of(items: Sequence[Item], name: str, command: str) -> list[Item]:
    found = [item for item in items if item.name == name]
    found = found or [item for item in items if name in item.used_by]
    path = Path(name).absolute()
    found = found or [item for item in items if path in {file.absolute() for file in item.files}]
    if not found:
        known = [*(item.name for item in items), *(use for item in items for use in item.used_by)]
        raise Unusable(
            f"models {command}: {name}: not found{nearest(name, known)}; `paddock models list` lists what is"
        )
    return found
