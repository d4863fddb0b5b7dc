"""`paddock models rm`: removes files from the models folder and frees their space."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from workers.commands.models.inventory import Item, chosen, real_paths, take_inventory
from workers.commands.models.parser import Request, Unusable
from workers.models.hub.progress import size_text
from workers.models.library import Library, ModelUnusable, wanted
from workers.protocol.exits import Exit

LOCK_PATIENCE_S = 5.0
"""Seconds to wait for a download in the folder to end."""


def run(request: Request) -> Exit:
    """Remove the named items and print what it freed. Raises CatalogError, ModelUnusable, Unusable, OSError."""
    options, library = request.options, request.library
    if bool(options.names) == options.unfinished:
        raise Unusable("models rm: give names, as `paddock models list` lists them, or --unfinished")
    if not library.folder.is_dir():
        raise Unusable(f"models rm: there is no folder {library.folder}; name it with --models-dir")
    busy = ModelUnusable(f"models rm: a download into {library.folder} is under way; wait for its end, or stop it")
    with library.alone(time.monotonic() + LOCK_PATIENCE_S, busy):
        items = take_inventory(library, wanted(request.settings), request.settings.state_dir)
        if options.unfinished:
            going = tuple(item for item in items if item.is_unfinished)
        else:
            going = chosen(items, options.names, "rm")
            for item in going:
                _check_free(item, library, is_forced=options.force)
        for line in remove(library, items, going):
            print(line, flush=True)
    return Exit.OK


def _check_free(item: Item, library: Library, *, is_forced: bool) -> None:
    """Raise Unusable if an item must not be removed, or not without --force."""
    outside = [file for file in item.files if not file.absolute().is_relative_to(library.folder)]
    # The record of a shared folder may have been written by others: it must not lead to files of another kind.
    if any(file.exists() and file.resolve().parent.name != "blobs" for file in outside) or (
        outside and not item.is_of_hub
    ):
        raise Unusable(f"models rm: {outside[0]} is not in {library.folder}; remove it yourself if nobody needs it")
    if is_forced:
        return
    if item.running:
        uses = ", ".join(item.running)
        raise Unusable(f"models rm: {item.name} is in use now, as {uses}; stop `paddock up` first, or give --force")
    if item.used_by:
        uses = ", ".join(item.used_by)
        raise Unusable(f"models rm: the catalog names {item.name}, as {uses}; take it out there first, or give --force")
    if outside:
        raise Unusable(
            f"models rm: {outside[0]} is in a cache that HF_HOME or HF_HUB_CACHE names, and other programs may use it; "
            "give --force if none does"
        )


def remove(library: Library, items: Sequence[Item], going: Sequence[Item]) -> Iterator[str]:
    """Remove items, and yield a line for each. Files that other items have as well are kept. Raises OSError."""
    names = {item.name for item in going}
    kept = real_paths(file for item in items if item.name not in names for file in item.files)
    # Whoever reads the record never finds a model whose files are gone on purpose.
    library.fetched.forget({item.name for item in going if item.is_of_hub})
    for item in going:
        shared = [file for file in item.files if file.resolve() in kept]
        freed = sum(_remove_file(file) for file in item.files if file not in shared)
        also = f"; others use {', '.join(file.name for file in shared)}, which is kept" if shared else ""
        yield f"{item.name}: removed, {size_text(freed)} freed{also}"
    _remove_dangling(library.folder)


def _remove_file(file: Path) -> int:
    """Remove a file and return the bytes that this freed. A link's content goes with it, unless another link of the
    repository leads there."""
    content = file.resolve()
    if not file.is_symlink():
        size = file.stat().st_size if file.exists() else 0
        file.unlink(missing_ok=True)
        return size
    file.unlink()
    repository = content.parent.parent
    links = (path for path in (repository / "snapshots").rglob("*") if path.is_symlink())
    if content.parent.name != "blobs" or any(link.resolve() == content for link in links) or not content.exists():
        return 0
    size = content.stat().st_size
    content.unlink()
    if not any(content.parent.iterdir()):
        shutil.rmtree(repository)
    return size


def _remove_dangling(folder: Path) -> None:
    """Remove links of `paddock models pull` whose files are gone. Raises OSError."""
    for link in folder.iterdir():
        if link.is_symlink() and not link.exists():
            link.unlink()
