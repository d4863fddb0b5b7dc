"""Checks the text of a catalog that is not in use yet, and tells each fault with the line that it stands in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec
import yaml

from workers.models.catalog import NAMED_BY_KEYS, Catalog, broken_rules
from workers.models.catalog_faults import MOST, MOST_LOOKED_FOR, Step, faults_of, more_than_told, shown
from workers.models.spec import TEMPLATE_NAMES, is_template
from workers.yaml_document import YamlInvalid, compose_yaml, load_yaml

TEMPLATE_FILES = (".jinja", ".jinja2", ".j2")
"""Endings of the names of templates' files."""
_LINE = re.compile(r"line (\d+), column \d+")
_FIELD = re.compile(r"^unknown field `([^`]*)`")
_PLACE = re.compile(r"^(?P<first>\w+)(?:\[(?P<number>\d+)\]|\.(?P<key>[^:\[ ]+))?")


class LineFault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of a catalog's text."""

    line: int
    """From 1; 0: it is the whole text's."""
    message: str
    """Where, what, and the remedy."""


def check_text(text: str, before: Catalog | None = None) -> tuple[Catalog | None, list[LineFault]]:
    """Return the checked catalog and no fault, or None and the faults: all of the document's form or, once there are
    none of these, all rules that it breaks; at most MOST, and how many more there are. `before`: the catalog in use."""
    found, faults = _judged(text, before)
    told = sorted(faults, key=lambda fault: fault.line)[:MOST]
    if len(faults) > MOST:
        told.append(LineFault(line=0, message=more_than_told(len(faults))))
    return found, told


def _judged(text: str, before: Catalog | None) -> tuple[Catalog | None, list[LineFault]]:
    """Return the catalog, or None and all of its text's faults."""
    try:
        document, root = load_yaml(text), compose_yaml(text)
    except YamlInvalid as error:
        lines = [int(line) for line in _LINE.findall(str(error))]
        return None, [LineFault(line=max(lines, default=0), message=f"not valid YAML or JSON: {error}")]
    try:
        found = msgspec.convert(document, Catalog)
    except msgspec.ValidationError as error:
        faults = [
            LineFault(line=_line_of(root, _steps_to(fault.path, fault.what)), message=shown(fault, document))
            for fault in faults_of(document, Catalog, NAMED_BY_KEYS)
        ]
        return None, faults or [LineFault(line=0, message=str(error))]
    rules = islice(broken_rules(found), MOST_LOOKED_FOR)
    broken = [LineFault(line=_line_of(root, _place_of(fault)), message=fault) for fault in rules]
    broken += _foreign_templates(found, root, before)
    return None if broken else found, broken


def _foreign_templates(catalog: Catalog, root: yaml.Node | None, before: Catalog | None) -> Iterator[LineFault]:
    """Yield a fault for each chat template that is a file without the ending of one. Every caller is shown a model's
    template, so whoever writes a catalog through the API could read any file of the machine by it."""
    known = TEMPLATE_NAMES | {"", *(model.chat_template for model in (before.models if before else ()))}
    for number, model in enumerate(catalog.models):
        named = model.chat_template
        if named in known or is_template(named) or named.endswith(TEMPLATE_FILES):
            continue
        yield LineFault(
            line=_line_of(root, ("models", number, "chat_template")),
            message=f"models[{number}] ({model.name}): chat_template: {named[:100]!r} is no template's name, and no "
            f"file whose name ends in {', '.join(TEMPLATE_FILES)}; rename the file, give the template's text, or "
            "write the path into the catalog on its machine",
        )


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
            pairs = {getattr(pair[0], "value", None): pair for pair in node.value}
            # A name may have dots, and what follows it in a message begins with one: `aliases.gpt-4.1.targets`.
            parts = str(step).split(".")
            names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
            pair = next((pairs[name] for name in names if name in pairs), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        else:
            break
    return line
