"""`paddock models list`: what lies in the models folder and what the catalog names."""

from __future__ import annotations

import json
from typing import Any

from workers.commands.layout import Column, table
from workers.commands.models.inventory import Item, take_inventory
from workers.commands.models.parser import Request
from workers.models.files import bytes_in
from workers.models.folder.folder import named_by
from workers.models.hub.progress import size_text
from workers.protocol.exits import Exit


def run(request: Request) -> Exit:
    """Print the list. Raises CatalogError, OSError."""
    library, settings = request.library, request.settings
    items = take_inventory(library, named_by(settings, may_be_empty=True), settings.state_dir)
    kept = bytes_in(library.folder)
    if request.options.json:
        document = {
            "folder": str(library.folder),
            "bytes": kept,
            "models_mib": settings.models_mib,
            "models": [_document(item, library.fetched.commit_of(item.name)) for item in items],
        }
        print(json.dumps(document, indent=2))
        return Exit.OK
    print(table(_COLUMNS, items, request.width))
    bound = f" of {size_text(settings.models_mib << 20)} (models_mib)" if settings.models_mib else ""
    told = f"{size_text(kept)}{bound}" if library.folder.is_dir() else "there is no such folder yet"
    print(f"\n{library.folder}: {told}")
    return Exit.OK


_COLUMNS: tuple[Column[Item], ...] = (
    Column("MODEL", lambda item: item.name),
    Column("QUANT", lambda item: item.quant),
    Column("SIZE", lambda item: size_text(item.num_bytes) if item.num_bytes else "", is_number=True),
    Column("STATE", lambda item: item.state),
    Column("IN CATALOG AS", lambda item: ", ".join(item.used_by)),
    Column("RUNS AS", lambda item: ", ".join(item.running)),
)


def _document(item: Item, commit: str) -> dict[str, Any]:
    return {
        "name": item.name,
        "is_of_hub": item.is_of_hub,
        "commit": commit,
        "quant": item.quant,
        "bytes": item.num_bytes,
        "state": item.state,
        "files": [str(file) for file in item.files],
        "in_catalog_as": list(item.used_by),
        "runs_as": list(item.running),
    }
