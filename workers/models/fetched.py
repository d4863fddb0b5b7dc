"""A record of what was fetched from the Hugging Face hub into a models folder, and checks of its files against it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from workers.models.files import COMMIT, FetchedModel, parts, sha256_of


class Content(msgspec.Struct, frozen=True):
    """The hash of one file's contents, and the size and time that the file had when it was last hashed."""

    sha256: str
    size: int
    mtime_ns: int


class Contents(msgspec.Struct, frozen=True):
    """The commit and the files that were fetched for one reference."""

    commit: str
    files: dict[str, Content]
    """File name in the model's folder -> its contents."""
    projector: str | None = None
    """Path of the projector; empty: there is none; None: nobody has looked for one."""


_decode_places = msgspec.json.Decoder(dict[str, str]).decode
_decode_contents = msgspec.json.Decoder(dict[str, Contents]).decode


class FileChanged(Exception):
    """A file has changed since it was fetched; the message names it and the remedy."""


class Fetched:
    """The record of the models fetched from the hub into a models folder, which several machines can share.

    `fetched.json` maps a reference to its file (the first part of a split model). `contents.json` maps it to its commit
    and each file's SHA-256, with the size and time that the file had when it was hashed."""

    def __init__(self, folder: Path) -> None:
        self._places = folder / "fetched.json"
        self._contents = folder / "contents.json"

    def path_of(self, reference: str, *, with_projector: bool = False) -> Path | None:
        """Return the path of a reference's file; None if it or a part is missing, or its projector where that is
        wanted and was fetched. Raises FileChanged if the contents are not those that were fetched."""
        place = self._located().get(reference)
        if place is None:
            return None
        projector = self.projector_of(reference) if with_projector else None
        paths = [*parts(Path(place)), *([projector] if projector else [])]
        if not all(path.is_file() for path in paths):
            return None
        self._check(reference, paths)
        return Path(place)

    def projector_of(self, reference: str) -> Path | None:
        """Return the path of the projector that was fetched with a model; None if its repository has none, or nobody
        has looked for one."""
        contents = self._known().get(reference)
        return Path(contents.projector) if contents is not None and contents.projector else None

    def has_looked_for_projector(self, reference: str) -> bool:
        """Return whether the repository was asked for a projector. Older versions did not, and neither do models that
        were fetched as drafts."""
        contents = self._known().get(reference)
        return contents is not None and contents.projector is not None

    def commit_of(self, reference: str) -> str:
        """Return the commit from which a reference's files were fetched; empty: none were, or the commit is unknown."""
        place = self._located().get(reference)
        if place is None:
            return ""
        known = self._known().get(reference)
        # The folder of a commit's files has its name, which helps where an older version kept no record of it.
        return known.commit if known else next((part for part in Path(place).parts if COMMIT.fullmatch(part)), "")

    def references(self) -> tuple[str, ...]:
        """Return the references of all models that were fetched, also of those whose files are gone."""
        return tuple(sorted(self._located()))

    def files_of(self, reference: str) -> tuple[Path, ...]:
        """Return the paths of a fetched model's files, whether they are there or not: its parts and its projector."""
        place, projector = self._located().get(reference), self.projector_of(reference)
        return (*(parts(Path(place)) if place else ()), *((projector,) if projector else ()))

    def sha256_of(self, reference: str, path: Path) -> str:
        """Return the SHA-256 that a model's file had when it was fetched; empty: it is not known."""
        contents = self._known().get(reference)
        content = contents.files.get(path.name) if contents else None
        return content.sha256 if content else ""

    def keep(self, reference: str, model: FetchedModel) -> None:
        """Record a model that was just fetched. A projector that came before with the same commit stays recorded."""
        before = self._known().get(reference)
        old = before if before and before.commit == model.commit else Contents(model.commit, {})
        projector = old.projector if model.projector is None else model.projector
        paths = [*parts(Path(model.path)), *([Path(model.projector)] if model.projector else [])]
        files = old.files | {part.name: _content(part, model.sha256[part.name]) for part in paths}
        _replace(self._contents, {**self._known(), reference: Contents(model.commit, files, projector)})
        _replace(self._places, {**self._located(), reference: model.path})

    def forget(self, references: Collection[str]) -> None:
        """Remove these models from the record, not their files. Raises OSError."""
        _replace(self._contents, {name: one for name, one in self._known().items() if name not in references})
        _replace(self._places, {name: place for name, place in self._located().items() if name not in references})

    def _located(self) -> dict[str, str]:
        try:
            return _decode_places(self._places.read_bytes())
        except (OSError, ValueError):  # msgspec's own, and UnicodeDecodeError
            return {}

    def _known(self) -> dict[str, Contents]:
        try:
            return _decode_contents(self._contents.read_bytes())
        except (OSError, ValueError):  # msgspec's own, and UnicodeDecodeError
            return {}

    def _check(self, reference: str, paths: Sequence[Path]) -> None:
        """Raise FileChanged if these files of a model have other contents than those fetched. Files with the recorded
        size and time count as unchanged; others are hashed."""
        known = self._known()
        contents = known.get(reference)
        if contents is None:
            return  # fetched by an older version
        seen = {part: contents.files.get(part.name) for part in paths}
        touched = [part for part, one in seen.items() if one is None or _content(part, one.sha256) != one]
        for part in touched:
            content = seen[part]
            if content is None or sha256_of(part) != content.sha256:
                raise FileChanged(
                    f"{part} is not what was fetched of {reference} (commit {contents.commit}); if you put it there, "
                    "name it with `path`; else remove it, and it is fetched again"
                )
        if touched:
            files = {part.name: _content(part, content.sha256) for part, content in seen.items() if content}
            now = msgspec.structs.replace(contents, files=contents.files | files)
            with contextlib.suppress(OSError):  # on a read-only volume the files are hashed again next time
                _replace(self._contents, {**known, reference: now})


def _content(path: Path, sha256: str) -> Content:
    status = os.stat(path)
    return Content(sha256, status.st_size, status.st_mtime_ns)


def _replace(file: Path, document: object) -> None:
    temporary = file.with_suffix(".new")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(document)))
    os.replace(temporary, file)
