"""Reads a catalog's file again when it changes, and tells what is different, for programs that run on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from workers.models.catalog import Catalog, CatalogError, FindFaults, no_faults, parse

POLL_S = 1.0
"""Seconds between two looks at a file. A change counts once two looks in a row have found the same."""

GONE = b""
"""Stands for the digest of a file that can't be read."""


class CatalogFile:
    """A catalog's file, which may be written anew, or replaced through a link, while its readers run.

    It is compared by its contents, since the times of files in mounted volumes (such as a ConfigMap's) tell little."""

    def __init__(self, path: Path, beside: FindFaults = no_faults) -> None:
        """`beside` returns what else is to be told of contents that break rules."""
        self.path = path
        self._beside = beside
        self._judged = GONE
        """Digest of the contents that were read last, whether they could be used or not."""
        self._seen = GONE
        """Digest of the contents at the last look."""

    def load(self) -> Catalog:
        """Return the catalog as the file has it now. Raises CatalogError."""
        try:
            raw = self.path.read_bytes()
        except OSError as error:
            self._judged = self._seen = GONE
            raise CatalogError(f"{self.path}: {error.strerror}; --catalog must name a readable file") from None
        self._judged = self._seen = _digest(raw)
        return parse(raw, self.path, self._beside)

    def poll(self) -> Catalog | None:
        """Return the catalog if the file has changed and has stayed so since the last call; None: there is nothing new.

        A file can be read while somebody writes it, and what has come so far may be valid: so one look is not enough.
        Raises CatalogError once for contents that can't be used, and once if the file is gone."""
        seen, self._seen = self._seen, self._look()
        if self._seen == self._judged or self._seen != seen:
            return None
        return self.load()

    def _look(self) -> bytes:
        """Return the digest of what the file has now."""
        try:
            return _digest(self.path.read_bytes())
        except OSError:
            return GONE


def _digest(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()


@dataclass(frozen=True, slots=True)
class Changes:
    """The names of one kind of a catalog's entries that another catalog has, lacks, or has otherwise."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


def differences(before: Catalog | None, after: Catalog) -> dict[str, Changes]:
    """Return for each part of a catalog (`models`, `aliases`, `settings`) what is different, without parts in which
    nothing is. `before` None: there was no catalog."""
    pairs = zip(({}, {}, {}) if before is None else _parts(before), _parts(after), strict=True)
    found = {name: _compare(*pair) for name, pair in zip(("models", "aliases", "settings"), pairs, strict=True)}
    return {name: changes for name, changes in found.items() if changes}


def _parts(catalog: Catalog) -> tuple[Mapping[str, object], Mapping[str, object], Mapping[str, object]]:
    rest = {name: getattr(catalog, name) for name in catalog.__struct_fields__ if name not in ("models", "aliases")}
    defaults = {f"default.{job}": name for job, name in msgspec.structs.asdict(rest.pop("default")).items() if name}
    return {model.name: model for model in catalog.models}, catalog.aliases, {**defaults, **rest}


def _compare(before: Mapping[str, object], after: Mapping[str, object]) -> Changes:
    return Changes(
        tuple(sorted(after.keys() - before.keys())),
        tuple(sorted(before.keys() - after.keys())),
        tuple(sorted(name for name in after.keys() & before.keys() if after[name] != before[name])),
    )
