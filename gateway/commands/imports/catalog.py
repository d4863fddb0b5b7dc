"""The catalog and the access file that an import makes: checks them, and writes them as YAML with comments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any

import yaml

from gateway.commands.imports.source import Keys, Note, Source, Unusable
from workers.models import catalog
from workers.models.catalog import CatalogError

WIDTH = 116
HEAD = "Made by `paddock import` of {name}. Relative paths are relative to this file now."


@dataclass(slots=True)
class Model:
    """A model of the catalog that is being made."""

    keys: Keys
    """Where it stands in the file that is imported."""
    entry: dict[str, Any]


@dataclass(slots=True)
class Imported:
    """The outcome of an import."""

    source: Source
    models: list[Model] = field(default_factory=list)
    aliases: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    access: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Sections of the file for `paddock apply`."""
    stubs: list[tuple[Keys, list[str]]] = field(default_factory=list)
    """Entries that can't be served, each as lines that tell what is missing."""

    def document(self) -> dict[str, Any]:
        """Return the catalog as a document."""
        parts = {"aliases": self.aliases, "groups": self.groups}
        return {
            "models": [model.entry for model in self.models],
            **{name: part for name, part in parts.items() if part},
        }


def checked(imported: Imported) -> dict[str, Any]:
    """Return the catalog's document, which the catalog's own reader takes. Raises Unusable."""
    document, source = imported.document(), imported.source
    if not imported.models:
        raise Unusable(
            f"{source.path}: no entry has weights that Paddock can serve; name a GGUF file or a model of the hub for "
            "one by --source NAME=FILE|OWNER/NAME[:QUANT]"
        )
    try:
        catalog.convert(document, "catalog")
    except CatalogError as error:
        raise Unusable(f"{source.path}: what it says can't be a catalog: {error}") from None
    return document


def catalog_text(imported: Imported) -> str:
    """Return the catalog as YAML; comments tell what has no counterpart, above the entry that it belonged to."""
    source = imported.source
    left = list(source.notes)
    lines = [*_comment(HEAD.format(name=source.path.name))]
    if source.unneeded:
        lines += _comment(f"Not needed in Paddock: {', '.join(sorted(source.unneeded))}.")
    body: list[str] = ["models:"]
    for model in imported.models:
        body += _comments_below(model.keys, left, "  ")
        body += [f"  {line}" for line in _yaml([model.entry])]
    for keys, told in imported.stubs:
        body += _comments_below(keys, left, "  ")
        body += [f"  # {line}" for line in told]
    for name, part in (("aliases", imported.aliases), ("groups", imported.groups)):
        if part:
            body += _yaml({name: part})
    return "\n".join([*lines, *_notes(left, ""), *body]) + "\n"


def access_text(imported: Imported) -> str:
    """Return the file for `paddock apply`."""
    head = _comment(f"Made by `paddock import` of {imported.source.path.name}; see it with `paddock apply --dry-run`.")
    return "\n".join([*head, *_yaml(imported.access)]) + "\n"


def _comments_below(keys: Keys, left: list[Note], indent: str) -> list[str]:
    """Return comments for the notes about an entry, and take these out of `left`."""
    found = [note for note in left if note.keys[: len(keys)] == keys]
    left[:] = [note for note in left if note not in found]
    return _notes(found, indent)


def _notes(notes: Sequence[Note], indent: str) -> list[str]:
    return [f"{indent}{line}" for note in notes for line in _comment(str(note))]


def _comment(text: str) -> list[str]:
    flat = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return [f"# {line}" for line in wrap(flat, WIDTH, subsequent_indent="  ", break_on_hyphens=False)]


def _yaml(document: Mapping[str, Any] | Iterable[Any]) -> Iterator[str]:
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH)
    yield from text.splitlines()


class _Dumper(yaml.SafeDumper):
    """A dumper that writes the same values in full each time, without references."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return that no value is written as a reference to an earlier one."""
        return True
