"""The names of models: of their files and of a split model's parts, and of a model of the hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

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
