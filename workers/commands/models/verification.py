"""`paddock models verify`: compares each file with the SHA-256 that it was fetched with, and checks its structure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from workers.commands.models.inventory import Item, chosen, take_inventory
from workers.commands.models.parser import Request
from workers.llama.gguf import read_header
from workers.llama.native import ModelError
from workers.models.fetched import Fetched
from workers.models.files import SPLIT, parts, sha256_of
from workers.models.library import wanted
from workers.protocol.exits import Exit


def run(request: Request) -> Exit:
    """Check the files, print a line for each, and return BROKEN if one is not what it should be. Raises CatalogError,
    Unusable, OSError."""
    items = take_inventory(request.library, wanted(request.settings), request.settings.state_dir)
    items = chosen(items, request.options.names, "verify") if request.options.names else items
    results = []
    for item in items:
        if item.is_unfinished:
            continue
        for file, checked, fault in check(item, request.library.fetched):
            results.append({"name": item.name, "file": str(file), "checked": checked, "fault": fault})
            if not request.options.json:
                print(f"{'BROKEN' if fault else 'ok'}\t{item.name}\t{fault or f'{file} ({checked})'}", flush=True)
    is_whole = not any(result["fault"] for result in results)
    if request.options.json:
        print(json.dumps({"is_whole": is_whole, "files": results}, indent=2))
    return Exit.OK if is_whole else Exit.BROKEN


def check(item: Item, fetched: Fetched) -> Iterator[tuple[Path, str, str]]:
    """Yield each file of an item, what was checked of it, and what is wrong with it; an empty text: nothing."""
    if not item.files:
        yield Path(item.name), "", f"{item.name} is not here; fetch it with `paddock models pull`"
    for file in item.files:
        digest = fetched.sha256_of(item.name, file) if item.is_of_hub else ""
        yield file, "SHA-256 and structure" if digest else "structure; its SHA-256 is not known", _fault(file, digest)


def _fault(file: Path, digest: str) -> str:
    if not file.is_file():
        return f"{file} is not here; fetch it with `paddock models pull`, or put it there"
    try:
        if digest and (found := sha256_of(file)) != digest:
            return (
                f"{file} has the SHA-256 {found}, and {digest} was fetched; remove it with `paddock models rm "
                "--force`, and fetch it again"
            )
        split = SPLIT.search(file.name)
        # The header of the first part stands for all, which are read with it.
        if split is None or int(split[1]) == 1 or not parts(file)[0].is_file():
            read_header(file)
    except ModelError as error:
        return str(error)
    except OSError as error:
        return f"{file} can't be read: {error.strerror}; check its permissions"
    return ""
