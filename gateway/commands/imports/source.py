"""Reads a neighbour's configuration file, keeps the line of each value, and collects what has no counterpart."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from workers.yaml_document import YamlInvalid, compose_yaml, load_yaml

Keys = tuple[str | int, ...]
"""The way to a value: keys of mappings and places in lists."""


class Unusable(ValueError):
    """The file can't be imported; the message names the file, the path inside it, and the remedy."""


HUB = re.compile(r"[^/\s:@.~][^/\s:@]*/[^/\s:@]+(:[^/\s:@]+)?(@[^\s:@]+)?")


def weights_field(text: str) -> str:
    """Return the field of a catalog that a model's source belongs to: `hf` for OWNER/NAME[:QUANT], else `path`."""
    return "hf" if HUB.fullmatch(text) and not text.lower().endswith(".gguf") else "path"


@dataclass(frozen=True, slots=True)
class Note:
    """Something in the file that the catalog does not have, and what to do about it."""

    line: int
    keys: Keys
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {path_text(self.keys)}: {self.text}"


@dataclass(slots=True)
class Source:
    """A configuration file that was read, and what has been found out about it."""

    path: Path
    document: dict[str, Any]
    lines: Mapping[Keys, int]
    notes: list[Note] = field(default_factory=list)
    unneeded: set[str] = field(default_factory=set)
    """Settings that have no use in Paddock, because it does that by itself."""

    def note(self, keys: Keys, text: str) -> None:
        """Record that a value has no counterpart, or another meaning."""
        self.notes.append(Note(self.line_of(keys), keys, text))

    def line_of(self, keys: Keys) -> int:
        """Return the line of a value, or of the nearest one around it."""
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return self.lines.get(keys, 1)

    def error(self, keys: Keys, text: str) -> Unusable:
        """Return the error that a value can't be used."""
        return Unusable(f"{self.path}: line {self.line_of(keys)}: {path_text(keys)}: {text}")

    def mapping(self, keys: Keys, value: Any) -> dict[str, Any]:
        """Return a value that must be a mapping; nothing counts as an empty one. Raises Unusable."""
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(keys, "must be a mapping of names to values; correct it there")
        return {str(key): one for key, one in value.items()}

    def listing(self, keys: Keys, value: Any) -> list[Any]:
        """Return a value that must be a list; nothing counts as an empty one. Raises Unusable."""
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.error(keys, "must be a list; correct it there")
        return value


def path_text(keys: Keys) -> str:
    """Return a path as people write it: `models.qwen.cmd`, `model_list[2].litellm_params`."""
    text = ""
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text or "the file"


def read(path: Path) -> Source:
    """Return a YAML or JSON file. Raises Unusable."""
    try:
        text = path.read_text(encoding="utf-8")
        document = load_yaml(text)
        lines = dict(_lines((), compose_yaml(text)))
    except OSError as error:
        raise Unusable(f"{path}: {error.strerror}; name a file that you may read") from None
    except (YamlInvalid, UnicodeDecodeError) as error:
        raise Unusable(f"{path}: not valid YAML: {error}") from None
    if not isinstance(document, dict):
        raise Unusable(f"{path}: must be a mapping with `models` (llama-swap) or `model_list` (LiteLLM)")
    return Source(path, {str(key): value for key, value in document.items()}, lines)


def _lines(keys: Keys, node: yaml.Node | None) -> Iterator[tuple[Keys, int]]:
    """Yield the path and the line of each value of a document."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = (*keys, str(key.value))
            yield below, key.start_mark.line + 1
            yield from _lines(below, value)
    elif isinstance(node, yaml.SequenceNode):
        for place, value in enumerate(node.value):
            yield (*keys, place), value.start_mark.line + 1
            yield from _lines((*keys, place), value)
