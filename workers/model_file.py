"""The names of model files: those of a split model's parts, and the plain name that stands for all of them."""

from __future__ import annotations

import re
from pathlib import Path

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
