"""Finds all that is wrong with a catalog's document, in words for whoever wrote it: where, what, and the remedy.

msgspec ends at the first fault and calls it by a path (`$.models[0].slotz`). So what it complains of is taken out of a
copy of the document, which is then read again.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

MOST = 10
"""Maximum number of faults that are told at once."""
FLAGS = {"name": "alias", "path": "model"}
"""Field of a model -> the setting that gives it, where that has another name."""
FORMS = {
    "name": "is no name: letters, digits and `._:/@+-`, from a letter or digit on, 128 at most",
    "hf": "is not OWNER/NAME[:QUANT][@REVISION], such as Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M",
}
"""Field whose values have a form -> what is wrong with others, in place of the form's regular expression."""

_AT = re.compile(r"^(?P<what>.*?) - at (?P<key>`key` in )?`(?P<path>\$[^`]*)`$", re.DOTALL)
_STEP = re.compile(r"\.(?P<key>\w+)|\[(?P<number>\d+)\]|(?P<any>\[\.\.\.\])")
_UNKNOWN = re.compile(r"^Object contains unknown field `([^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `([^`]*)`$")

Step = str | int


class Fault(NamedTuple):
    """A fault of a document."""

    path: tuple[Step, ...]
    """Keys and numbers that lead to it."""
    what: str
    """What is wrong there, and the remedy."""


def faults_of(document: Any, kind: Any, named: Mapping[str, Any], known: list[str]) -> Iterator[Fault]:
    """Yield the faults of a document that is to be of this `kind`, at most MOST.

    `named`: fields that are mappings -> the type of their values: msgspec has one path, `$.aliases[...]`, for them all.
    `known`: the names of all fields, among which the one that was meant is looked for."""
    rest = copy.deepcopy(document)
    removed: set[tuple[Step, ...]] = set()
    for _ in range(MOST):
        try:
            msgspec.convert(rest, kind)
            return
        except msgspec.ValidationError as error:
            found = _AT.match(str(error))
            what, told = (found["what"], found["path"]) if found else (str(error), "$")
            what = f"a key is wrong: {what}" if found and found["key"] else what
        path = _steps(told, rest, named)
        missing = _MISSING.match(what)
        if missing is None or (*path, missing[1]) not in removed:
            yield Fault(path, _words(what, path, rest, known))
        if (meant := _meant(what, known)) is not None:
            removed.add((*path, meant))
        gone = _without(rest, path, what)
        if gone is None:
            return
        removed.add(gone)


def shown(fault: Fault, document: Any) -> str:
    """Return a fault as a line: `models[0] (big): llama: unknown field ...`."""
    path, place = list(fault.path), ""
    if path[:1] == ["models"] and len(path) > 1 and isinstance(path[1], int):
        number = path[1]
        model = document["models"][number]
        name = model.get("name") if isinstance(model, dict) else None
        place, path = f"models[{number}]{f' ({name})' if isinstance(name, str) else ''}: ", path[2:]
    elif len(path) > 1 and isinstance(path[1], str):
        place, path = f"{path[0]}.{path[1]}: ", path[2:]
    inner = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
    return f"{place}{f'{inner}: ' if inner else ''}{fault.what}"


def shown_as_flag(fault: Fault) -> str:
    """Return a fault of a model that is made of settings: `--llama: unknown field ...`."""
    first, *inner = [str(step) for step in fault.path[2:]] or ["model"]
    first = FLAGS.get(first, first)
    return f"--{first.replace('_', '-')}: {'.'.join(inner)}{': ' if inner else ''}{fault.what}"


def _steps(told: str, document: Any, named: Mapping[str, Any]) -> tuple[Step, ...]:
    """Return the steps of msgspec's path."""
    steps: list[Step] = []
    for step in _STEP.finditer(told):
        if step["key"] is not None:
            steps.append(step["key"])
        elif step["number"] is not None:
            steps.append(int(step["number"]))
        else:
            steps.append(_first_unreadable(_at(document, steps), named.get(str(steps[-1])) if steps else None))
    return tuple(steps)


def _first_unreadable(mapping: Any, kind: Any) -> str:
    """Return a mapping's first key whose value can't be decoded."""
    if isinstance(mapping, dict) and kind is not None:
        for key, value in mapping.items():
            try:
                msgspec.convert(value, kind)
            except msgspec.ValidationError:
                return str(key)
    return "<name>"


def _at(document: Any, path: list[Step] | tuple[Step, ...]) -> Any:
    """Return what is at a path; None: there is nothing."""
    for step in path:
        try:
            document = document[step]
        except (KeyError, IndexError, TypeError):
            return None
    return document


def _words(what: str, path: tuple[Step, ...], document: Any, known: list[str]) -> str:
    if unknown := _UNKNOWN.match(what):
        meant = _meant(what, known)
        return f"unknown field `{unknown[1]}`{f' (did you mean `{meant}`?)' if meant else ''}"
    if missing := _MISSING.match(what):
        return f"`{missing[1]}` is missing"
    if path and path[-1] in FORMS and "matching regex" in what:
        return f"{_at(document, path)!r:.80} {FORMS[str(path[-1])]}"
    return what[:1].lower() + what[1:]


def _meant(what: str, known: list[str]) -> str | None:
    """Return the field that was meant by an unknown one; None: that can't be guessed, or none is unknown."""
    unknown = _UNKNOWN.match(what)
    return next(iter(difflib.get_close_matches(unknown[1], known, n=1)), None) if unknown else None


def _without(document: Any, path: tuple[Step, ...], what: str) -> tuple[Step, ...] | None:
    """Take what msgspec complains of out of a document; return its path, or None if that can't be."""
    unknown = _UNKNOWN.match(what)
    target = (*path, unknown[1]) if unknown is not None else path
    if _MISSING.match(what) and len(path) > 1:
        # What is missing can't be made up: the whole entry goes, and what else is wrong with it is told next time.
        place = _at(document, path[:1])
        if path[0] == "models" and isinstance(place, list) and isinstance(path[1], int):
            place[path[1]] = {"name": f"entry-{path[1]}", "path": "x.gguf"}
            return path
    parent = _at(document, target[:-1]) if target else None
    if isinstance(parent, dict) and target[-1] in parent:
        del parent[target[-1]]
        return target
    return None
