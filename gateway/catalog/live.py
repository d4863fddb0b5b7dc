"""Keeps the catalog that a gateway uses, and takes the file's new contents when it changes.

A catalog is checked whole and then replaces the one before at once: each call uses the one that was there when its body
was read. Contents that can't be used change nothing; `fault` says what is wrong with them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gateway.catalog.names import ModelNames
from workers.models.catalog import Catalog, CatalogError
from workers.models.catalog_file import POLL_S, CatalogFile, Changes, differences

log = logging.getLogger(__name__)

Result = Literal["taken", "refused"]
"""Whether new contents of the file could be used."""


@dataclass(frozen=True, slots=True)
class Version:
    """One catalog, in the two forms in which it is used."""

    catalog: Catalog | None
    """None: the gateway was started without a catalog."""
    names: ModelNames
    taken_at: float
    """Unix time at which it was read."""


class LiveCatalog:
    """The catalog of this gateway process. Its file is looked at every POLL_S seconds."""

    def __init__(self, path: Path | None, told: Callable[[Result], None] = lambda result: None) -> None:
        """`path`: the catalog's file; None: there is no catalog. `told` is called for new contents of the file.
        Raises CatalogError."""
        self._file = None if path is None else CatalogFile(path)
        self._told = told
        self._listeners: list[Callable[[ModelNames], None]] = []
        self._reading = asyncio.Lock()
        self.fault = ""
        """What is wrong with the file's contents, which are not used therefore; empty: they are used."""
        self.withdrawn = frozenset[str]()
        """Models that have left the catalog since this process began."""
        self._version = _version(None if self._file is None else self._file.load())

    @property
    def names(self) -> ModelNames:
        """The names of the catalog that is used now. Take them once for all steps that belong together."""
        return self._version.names

    @property
    def catalog(self) -> Catalog | None:
        """The catalog that is used now; None: the gateway was started without one."""
        return self._version.catalog

    @property
    def models(self) -> frozenset[str] | None:
        """The models that the catalog names; None: the gateway was started without one."""
        return None if self._version.catalog is None else self._version.names.models

    @property
    def taken_at(self) -> float:
        """Unix time at which the catalog that is used now was read."""
        return self._version.taken_at

    @property
    def path(self) -> Path | None:
        """The catalog's file; None: there is none."""
        return None if self._file is None else self._file.path

    def listen(self, on_change: Callable[[ModelNames], None]) -> None:
        """Have `on_change` called with the names of each new catalog."""
        self._listeners.append(on_change)

    async def reload(self) -> Mapping[str, Changes]:
        """Read the file now, and return what is different (`differences`). Raises CatalogError; then nothing changes.

        Only for a gateway with a catalog."""
        if self._file is None:
            raise CatalogError("this gateway has no catalog; start it with --catalog")
        return await self._take(self._file.load)

    async def run(self) -> None:
        """Take the file's new contents, until cancelled."""
        while self._file is not None:
            await asyncio.sleep(POLL_S)
            try:
                await self._take(self._file.poll)
            except CatalogError:
                continue  # told and logged

    async def _take(self, read: Callable[[], Catalog | None]) -> Mapping[str, Changes]:
        """Use the catalog that `read` returns; None: there is no new one. Raises CatalogError."""
        async with self._reading:
            try:
                # On a thread: the parsing of a long file takes a while, and a mounted folder may be slow.
                catalog = await asyncio.to_thread(read)
            except CatalogError as error:
                self.fault = str(error)
                self._told("refused")
                log.error("catalog refused: %s; the one before stays in use", error)
                raise
            if catalog is None:
                return {}
            changes = differences(self._version.catalog, catalog)
            before = self.withdrawn | self._version.names.models
            self.fault, self._version = "", _version(catalog)
            self.withdrawn = before - self._version.names.models
            for on_change in self._listeners:
                on_change(self._version.names)
            self._told("taken")
            log.info("catalog taken", extra={"fields": {name: told_of(one) for name, one in changes.items()}})
            return changes


def told_of(changes: Changes) -> dict[str, list[str]]:
    """Return changes as log lines and answers have them, without empty lists."""
    named = {"added": changes.added, "removed": changes.removed, "changed": changes.changed}
    return {how: list(names) for how, names in named.items() if names}


def _version(catalog: Catalog | None) -> Version:
    return Version(catalog, ModelNames(catalog), time.time())
