"""Follows the folder of `models_dir` while its models are served; writes a new catalog when other files lie there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from workers.models.catalog import Catalog, CatalogError
from workers.models.folder.contents import Contents
from workers.models.folder.folder import ModelsFolder, catalog_of, folder_of
from workers.settings import SupervisorSettings
from workers.supervisor.catalog_watch import beside
from workers.supervisor.output import Console

POLL_S = 2.0
"""Seconds between two looks at the folder."""
MAX_TOLD = 20
"""Maximum number of names or files that are told at once."""


class FolderWatch:
    """The folder whose models this machine serves. What lies there and is no model is told once."""

    def __init__(self, folder: ModelsFolder, settings: SupervisorSettings, console: Console) -> None:
        self._folder = folder
        self._settings = settings
        self._console = console
        self._told: set[str] = set()
        self._names: frozenset[str] = frozenset()

    @classmethod
    def of(cls, settings: SupervisorSettings, console: Console) -> FolderWatch | None:
        """Return a watch of the folder that the settings ask to serve; None: they name a model, or a catalog. Raises
        CatalogError."""
        folder = folder_of(settings)
        return None if folder is None else cls(ModelsFolder(folder), settings, console)

    def load(self) -> Catalog:
        """Return a catalog of what lies there now, and tell it. Raises CatalogError."""
        return self._taken(self._folder.load())

    async def run(self, keep: Callable[[bytes], None]) -> None:
        """Have `keep` write each new catalog, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                if await beside(self._folder.has_changed):
                    keep(msgspec.json.encode(self._taken(await beside(self._folder.load))))
            except (CatalogError, OSError) as error:
                self._say_once(f"paddock: {error}; the models stay as they are")
            except RuntimeError as error:  # no thread can be started just now
                self._console.say(f"paddock: {self._folder.path} can't be looked at just now: {error}")

    def _taken(self, contents: Contents) -> Catalog:
        """Return the catalog of the folder's contents, and tell what is new. Raises CatalogError."""
        path = self._folder.path
        lines = [f"paddock: {_shown(one.path)} is not served: {one.why}" for one in contents.left_out]
        if more := lines[MAX_TOLD:]:
            lines = [*lines[:MAX_TOLD], f"paddock: {len(more)} more files in {path} are not served"]
        for line in lines:
            self._say_once(line)
        self._told.intersection_update(lines)
        found = catalog_of(contents, path, self._settings)
        names = frozenset(model.name for model in contents.models)
        new, gone = sorted(names - self._names), sorted(self._names - names)
        if new:
            self._console.say(f"paddock: {'also ' if self._names else ''}served from {path}: {_listed(new)}")
        if gone:
            self._console.say(f"paddock: no longer in {path}: {_listed(gone)}")
        self._names = names
        return found

    def _say_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._console.say(line)


def _shown(path: Path) -> str:
    """Return a path as text, whatever bytes its name has."""
    return os.fsencode(path).decode(errors="replace")


def _listed(names: list[str]) -> str:
    more = len(names) - MAX_TOLD
    return ", ".join(names[:MAX_TOLD]) + (f" and {more} more" if more > 0 else "")
