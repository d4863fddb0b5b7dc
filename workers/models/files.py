"""The names of models' files, of a split model's parts and of models of the hub, and the record of the models that were
fetched from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

import msgspec

SUFFIX = ".gguf"
SPLIT = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
"""The part number that llama.cpp writes before the suffix."""


def parts(first: Path) -> tuple[Path, ...]:
    """Return all files of a model in order, given its only file or its first part."""
    split = SPLIT.search(first.name)
    if split is None:
        return (first,)
    count = int(split[2])
    return tuple(
        first.with_name(SPLIT.sub(f"-{number:05}-of-{split[2]}", first.name)) for number in range(1, count + 1)
    )


def first_part(path: Path) -> Path:
    """Return `NAME-00001-of-0000N.gguf` for a `NAME.gguf` of which only that is there: settings need no part count."""
    if path.suffix.lower() != SUFFIX or path.exists():
        return path
    prefix, found = f"{path.stem}-00001-of-", []
    if path.parent.is_dir():
        found = [near for near in path.parent.iterdir() if near.name.startswith(prefix) and SPLIT.search(near.name)]
    return found[0] if len(found) == 1 else path


def plain_name(model: str) -> str:
    """Return a served name as the stem of a file."""
    return re.sub(r"[/:]", "--", model)


COMMIT = re.compile(r"[0-9a-f]{40}")


class HubReference(NamedTuple):
    """The name of a model of the Hugging Face hub: `OWNER/NAME[:QUANT][@REVISION]`."""

    repo: str
    quant: str = ""
    """The quantisation, part of a file's name; empty: the preferred one that is there."""
    revision: str = ""
    """Branch, tag or commit; empty: the newest."""

    @property
    def is_pinned(self) -> bool:
        """Whether the reference names one commit, so that it means the same files for ever."""
        return COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        quant, revision = f":{self.quant}" if self.quant else "", f"@{self.revision}" if self.revision else ""
        return self.repo + quant + revision


def parse_reference(text: str) -> HubReference:
    """Return the parts of a reference; they are checked only when the hub is asked."""
    rest, _, revision = text.partition("@")
    repo, _, quant = rest.partition(":")
    return HubReference(repo, quant, revision)


BLOCK_BYTES = 8 << 20


class Content(msgspec.Struct, frozen=True):
    """One file's contents, when it was last checked."""

    sha256: str
    size: int
    mtime_ns: int


class FetchedModel(msgspec.Struct, frozen=True):
    """A model that was fetched."""

    path: str
    """Path of its file, or of the first part."""
    commit: str
    sha256: dict[str, str]
    """File name -> SHA-256, of each part."""


class Contents(msgspec.Struct, frozen=True):
    """The commit and files of one reference."""

    commit: str
    files: dict[str, Content]
    """File name in the model's folder -> its contents."""


decode_model = msgspec.json.Decoder(FetchedModel).decode
_decode_places = msgspec.json.Decoder(dict[str, str]).decode
_decode_contents = msgspec.json.Decoder(dict[str, Contents]).decode


class FileChanged(Exception):
    """A file has changed since it was fetched; the message names it and the remedy."""


class Fetched:
    """The record of the models fetched from the hub into a models folder. Methods may raise OSError where they write.

    `fetched.json` maps a reference to its file (the first part of a split model). `contents.json` maps it to its commit
    and each file's SHA-256, with the size and time that the file had when it was checked. Other machines may share the
    folder.
    """

    def __init__(self, folder: Path) -> None:
        self._places = folder / "fetched.json"
        self._contents = folder / "contents.json"

    def path_of(self, reference: str) -> Path | None:
        """Return a reference's file; None unless all its parts are there. Raises FileChanged for other contents."""
        place = self._located().get(reference)
        if place is None or not all(part.is_file() for part in parts(Path(place))):
            return None
        self._check(reference, Path(place))
        return Path(place)

    def commit_of(self, reference: str) -> str:
        """Return the commit that a reference was fetched at; empty: it was not fetched, or the commit is unknown."""
        if reference not in self._located():
            return ""
        known = self._known().get(reference)
        return known.commit if known else ""

    def keep(self, reference: str, model: FetchedModel) -> None:
        files = {part.name: _content(part, model.sha256[part.name]) for part in parts(Path(model.path))}
        _replace(self._contents, {**self._known(), reference: Contents(model.commit, files)})
        _replace(self._places, {**self._located(), reference: model.path})

    def _located(self) -> dict[str, str]:
        try:
            return _decode_places(self._places.read_bytes())
        except (OSError, msgspec.DecodeError):
            return {}

    def _known(self) -> dict[str, Contents]:
        try:
            return _decode_contents(self._contents.read_bytes())
        except (OSError, msgspec.DecodeError):
            return {}

    def _check(self, reference: str, path: Path) -> None:
        """Check a model's files. Those with the same size and time count as unchanged; others are hashed. Raises
        FileChanged."""
        known = self._known()
        contents = known.get(reference)
        if contents is None:
            return  # fetched by an older version
        seen = {part: contents.files.get(part.name) for part in parts(path)}
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
            with contextlib.suppress(OSError):  # on a volume that can only be read it is compared again next time
                _replace(self._contents, {**known, reference: Contents(contents.commit, files)})


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
