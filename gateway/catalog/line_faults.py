"""Checks the text of a catalog that is not in use yet, and tells each fault with the line that it stands in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import yaml

from workers.models.catalog import NAMED_BY_KEYS, Catalog, CatalogError, check
from workers.models.catalog_faults import Step, faults_of, shown
from workers.yaml_document import YamlInvalid, compose_yaml, load_yaml

_LINE = re.compile(r"line (\d+), column \d+")
_FIELD = re.compile(r"^unknown field `([^`]*)`")
_PLACE = re.compile(r"^(?P<first>\w+)(?:\[(?P<number>\d+)\]|\.(?P<key>[^:\[ ]+))?")


class LineFault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of a catalog's text."""

    line: int
    """From 1; 0: it is the whole text's."""
    message: str
    """Where, what, and the remedy."""


def check_text(text: str, path: Path) -> tuple[Catalog | None, list[LineFault]]:
    """Return the checked catalog and no fault, or None and the faults: all of the document's form or, once there are
    none of these, the first rule that it breaks. `path`: the file that it is for."""
    try:
        document, root = load_yaml(text), compose_yaml(text)
    except YamlInvalid as error:
        lines = [int(line) for line in _LINE.findall(str(error))]
        return None, [LineFault(line=max(lines, default=0), message=f"not valid YAML or JSON: {error}")]
    try:
        return check(msgspec.convert(document, Catalog), str(path)), []
    except msgspec.ValidationError as error:
        found = [
            LineFault(line=_line_of(root, _steps_to(fault.path, fault.what)), message=shown(fault, document))
            for fault in faults_of(document, Catalog, NAMED_BY_KEYS)
        ]
        return None, sorted(found, key=lambda fault: fault.line) or [LineFault(line=0, message=str(error))]
    except CatalogError as error:
        message = str(error).removeprefix(f"{path}: ")
        return None, [LineFault(line=_line_of(root, _place_of(message)), message=message)]


def _steps_to(path: tuple[Step, ...], what: str) -> tuple[Step, ...]:
    """Return the steps to a fault; those to an unknown field lead to where it stands, not to what has it."""
    field = _FIELD.match(what)
    return path if field is None else (*path, field[1])


def _place_of(message: str) -> tuple[Step, ...]:
    """Return the steps to the place that begins a message: `models[3] (name): ...`, `aliases.gpt: ...`."""
    found = _PLACE.match(message)
    if found is None:
        return ()
    if found["number"] is not None:
        return found["first"], int(found["number"])
    return (found["first"],) if found["key"] is None else (found["first"], found["key"])


def _line_of(node: yaml.Node | None, steps: Sequence[Step]) -> int:
    """Return the line of the last step that there is; 0: the first is none."""
    line = 0
    for step in steps:
        if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            line = node.start_mark.line + 1
        elif isinstance(node, yaml.MappingNode):
            pair = next((pair for pair in node.value if getattr(pair[0], "value", None) == str(step)), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        else:
            break
    return line
