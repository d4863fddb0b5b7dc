"""Names of model files, of a split model's parts and of models on the Hugging Face hub; a record of fetched ones."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

SUFFIX = ".gguf"
DRAFT, PROJECTOR = ".draft", ".projector"
"""What a model's name ends with in the names of its draft model's file and its projector's, before the suffix."""
SPLIT = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
"""The part number and the count of parts, which llama.cpp writes before the suffix."""


def parts(first: Path) -> tuple[Path, ...]:
    """Return the paths of all files of a model in order, given its only file or its first part."""
    split = SPLIT.search(first.name)
    if split is None:
        return (first,)
    count = int(split[2])
    return tuple(
        first.with_name(SPLIT.sub(f"-{number:05}-of-{split[2]}", first.name)) for number in range(1, count + 1)
    )


def first_part(path: Path) -> Path:
    """Return `NAME-00001-of-0000N.gguf` for `NAME.gguf` if `NAME.gguf` does not exist but that first part does, so that
    settings can leave out the part's number. Return other paths unchanged."""
    if path.suffix.lower() != SUFFIX or path.exists():
        return path
    prefix, found = f"{path.stem}-00001-of-", []
    if path.parent.is_dir():
        found = [near for near in path.parent.iterdir() if near.name.startswith(prefix) and SPLIT.search(near.name)]
    return found[0] if len(found) == 1 else path


def plain_name(model: str) -> str:
    """Return the name of a served model in a form that can be a file's name, with `--` for each `/` and `:`."""
    return re.sub(r"[/:]", "--", model)


COMMIT = re.compile(r"[0-9a-f]{40}")


class HubReference(NamedTuple):
    """The name of a model of the Hugging Face hub: `OWNER/NAME[:QUANT][@REVISION]`."""

    repo: str
    quant: str = ""
    """The quantisation, as it is in the file's name; empty: a preferred one that the repository has."""
    revision: str = ""
    """Branch, tag or commit; empty: the newest commit."""

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, so that the reference always means the same files."""
        return COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        quant, revision = f":{self.quant}" if self.quant else "", f"@{self.revision}" if self.revision else ""
        return self.repo + quant + revision


def parse_reference(text: str) -> HubReference:
    """Return a reference's parts. They are not checked here: the hub answers with an error if one is wrong."""
    rest, _, revision = text.partition("@")
    repo, _, quant = rest.partition(":")
    return HubReference(repo, quant, revision)


BLOCK_BYTES = 8 << 20


class Content(msgspec.Struct, frozen=True):
    """The hash of one file's contents, and the size and time that the file had when it was last hashed."""

    sha256: str
    size: int
    mtime_ns: int


class FetchedModel(msgspec.Struct, frozen=True):
    """A model that was fetched from the hub."""

    path: str
    """Path of the model's file, or of the first part of a split one."""
    commit: str
    sha256: dict[str, str]
    """File name of each part, and of the projector -> SHA-256."""
    projector: str = ""
    """Path of the file that makes the model see or hear; empty: its repository has none."""


class Contents(msgspec.Struct, frozen=True):
    """The commit and the files that were fetched for one reference."""

    commit: str
    files: dict[str, Content]
    """File name in the model's folder -> its contents."""
    projector: str = ""
    """Path of the projector; empty: there is none."""


decode_model = msgspec.json.Decoder(FetchedModel).decode
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

    def path_of(self, reference: str) -> Path | None:
        """Return the path of a reference's file; None if it, a part or its projector is missing. Raises FileChanged if
        the contents are not those that were fetched."""
        place = self._located().get(reference)
        if place is None:
            return None
        projector = self.projector_of(reference)
        paths = [*parts(Path(place)), *([projector] if projector else [])]
        if not all(path.is_file() for path in paths):
            return None
        self._check(reference, paths)
        return Path(place)

    def projector_of(self, reference: str) -> Path | None:
        """Return the path of the projector that was fetched with a model; None if its repository had none."""
        contents = self._known().get(reference)
        return Path(contents.projector) if contents is not None and contents.projector else None

    def commit_of(self, reference: str) -> str:
        """Return the commit from which a reference's files were fetched; empty: none were, or the commit is unknown."""
        if reference not in self._located():
            return ""
        known = self._known().get(reference)
        return known.commit if known else ""

    def keep(self, reference: str, model: FetchedModel) -> None:
        paths = [*parts(Path(model.path)), *([Path(model.projector)] if model.projector else [])]
        files = {part.name: _content(part, model.sha256[part.name]) for part in paths}
        _replace(self._contents, {**self._known(), reference: Contents(model.commit, files, model.projector)})
        _replace(self._places, {**self._located(), reference: model.path})

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


def sha256_of(path: Path) -> str:
    seen = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            seen.update(block)
    return seen.hexdigest()


def _content(path: Path, sha256: str) -> Content:
    status = os.stat(path)
    return Content(sha256, status.st_size, status.st_mtime_ns)


def _replace(file: Path, document: object) -> None:
    temporary = file.with_suffix(".new")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(document)))
    os.replace(temporary, file)
