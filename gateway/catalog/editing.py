"""Checks and writes the catalog's file for admins who edit it in the console."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from gateway.catalog.line_faults import LineFault, check_text
from gateway.catalog.live import LiveCatalog, told_of
from gateway.errors import CatalogChanged, CatalogRefused, NotSupported
from workers.models.catalog_file import differences

MAX_TEXT_BYTES = 1 << 20
"""Maximum bytes of a catalog that is shown or taken."""


@dataclass(frozen=True, slots=True)
class CatalogText:
    """The contents of the catalog's file."""

    text: str
    digest: str
    """Of the contents: whoever writes says by it which ones were read."""
    unwritable: str
    """Why this gateway can't write the file, and what to do instead; empty: it can."""


@dataclass(frozen=True, slots=True)
class TextCheck:
    faults: list[LineFault]
    changes: dict[str, dict[str, list[str]]]
    """What would be different from the catalog in use: part -> `added`, `removed`, `changed` -> names."""


class CatalogEditing:
    """Reads, checks and writes the file of the catalog that this gateway uses. Its methods block."""

    def __init__(self, catalog: LiveCatalog) -> None:
        self._catalog = catalog

    def read(self) -> CatalogText:
        """Return the file's contents. Raises NotSupported."""
        path = self._path()
        try:
            raw = path.read_bytes()
            if len(raw) > MAX_TEXT_BYTES:
                raise NotSupported(
                    f"{path} has {len(raw):,} bytes, and up to {MAX_TEXT_BYTES:,} are shown. Edit it there."
                )
            return CatalogText(raw.decode(), _digest(raw), _unwritable(path))
        except OSError as error:
            raise NotSupported(f"{path} can't be read: {error.strerror}.") from None
        except UnicodeDecodeError:
            raise NotSupported(f"{path} is no UTF-8. Edit it there.") from None

    def check(self, text: str) -> TextCheck:
        """Return what is wrong with a catalog's text, and what it would change. Raises NotSupported."""
        self._path()
        found, faults = check_text(text, self._catalog.catalog)
        if found is None:
            return TextCheck(faults, {})
        changes = differences(self._catalog.catalog, found)
        return TextCheck([], {part: told_of(one) for part, one in changes.items()})

    def write(self, text: str, digest: str) -> None:
        """Put a checked text in the place of the file's contents. `digest`: of the contents that it was made from.

        Raises CatalogRefused, CatalogChanged, NotSupported."""
        path = self._path()
        if faults := check_text(text, self._catalog.catalog)[1]:
            told = "; ".join(f"line {one.line}: {one.message}" if one.line else one.message for one in faults)
            raise CatalogRefused(f"{told} (the file stays as it is)")
        if self.read().digest != digest:
            raise CatalogChanged(f"{path} has changed since it was read. Read it again, and make your changes there.")
        if why := _unwritable(path):
            raise NotSupported(why)
        try:
            _replace(path.resolve(), text.encode())
        except OSError as error:
            raise NotSupported(f"{path} can't be written: {error.strerror}. {_ELSEWHERE}") from None

    def _path(self) -> Path:
        if self._catalog.path is None:
            raise NotSupported("This gateway has no catalog. Start it with --catalog (PADDOCK_CATALOG).")
        return self._catalog.path


_ELSEWHERE = (
    "Change it where it comes from: a ConfigMap or the chart's values, a repository, or the file as its owner. "
    "Gateways and supervisors take the new contents within seconds."
)


def _unwritable(path: Path) -> str:
    """Return why a file can't be written, and what to do instead; empty: it can be."""
    file = path.resolve()
    if os.access(file, os.W_OK) and os.access(file.parent, os.W_OK):
        return ""
    return f"This gateway's process may not write {path}. {_ELSEWHERE}"


def _replace(file: Path, raw: bytes) -> None:
    """Write a file beside, and rename it: nobody reads a part of it. Raises OSError."""
    beside = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file.stat().st_mode & 0o777)
        with os.fdopen(descriptor, "wb") as written:
            written.write(raw)
            written.flush()
            os.fsync(written.fileno())
        beside.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
