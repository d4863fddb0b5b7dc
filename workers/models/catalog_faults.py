"""Finds all that is wrong with a catalog's document, in words for whoever wrote it: where, what, and the remedy.

msgspec ends at the first fault and calls it by a path (`$.models[0].slotz`). So what it complains of is taken out of a
copy of the document, which is then read again.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

MOST = 10
"""Maximum number of faults that are told at once; of others only how many there are."""
MOST_LOOKED_FOR = 50
"""Maximum number of faults that are looked for. One of a document's form takes another reading of the document."""
FLAGS = {"name": "alias", "path": "model"}
"""Field of a model -> the setting that gives it, where that has another name."""
FORMS = {
    "name": "is no name: letters, digits and `._:/@+-`, from a letter or digit on, 128 at most",
    "hf": "is not OWNER/NAME[:QUANT][@REVISION], such as Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M",
}
"""Field whose values have a form -> what is wrong with others, in place of the form's regular expression."""
OF_HUB = re.compile(r"^https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<reference>[\w.-]+/[\w.-]+)")
"""The address of a model's page."""

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


def faults_of(document: Any, kind: Any, named: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the faults of a document that is to be of this `kind`, at most MOST_LOOKED_FOR.

    `named`: fields that are mappings -> the type of their values: msgspec has one path for them all,
    `$.aliases[...]`."""
    rest = copy.deepcopy(document)
    removed: set[tuple[Step, ...]] = set()
    for _ in range(MOST_LOOKED_FOR):
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
            # Structs tell all that is wrong with them at once, a line each.
            yield from (Fault(path, _words(line, path, rest, kind)) for line in what.split("\n"))
        if (meant := _meant(what, path, kind)) is not None:
            removed.add((*path, meant))
        gone = _without(rest, path, what)
        if gone is None:
            return
        removed.add(gone)


def told(place: str, faults: Sequence[str]) -> str:
    """Return one text of what is wrong with something: one fault, or a line for each of MOST, and how many more there
    are. `place`: the beginning of the text, such as the file's name."""
    if len(faults) == 1:
        return f"{place}{faults[0]}"
    head = f"{len(faults)} faults{' or more' if len(faults) >= MOST_LOOKED_FOR else ''}:"
    more = [more_than_told(len(faults))] if len(faults) > MOST else []
    return "\n  ".join((f"{place}{head}", *faults[:MOST], *more))


def more_than_told(num_faults: int) -> str:
    """Return the words for the faults that are not told; there may be more than were looked for."""
    return f"and {num_faults - MOST}{' or' if num_faults >= MOST_LOOKED_FOR else ''} more"


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


def _words(what: str, path: tuple[Step, ...], document: Any, kind: Any) -> str:
    if unknown := _UNKNOWN.match(what):
        meant = _meant(what, path, kind)
        if meant == unknown[1]:
            return f"unknown field `{meant}` (it belongs to another place of the catalog)"
        return f"unknown field `{unknown[1]}`{f' (did you mean `{meant}`?)' if meant else ''}"
    if missing := _MISSING.match(what):
        return f"`{missing[1]}` is missing"
    if path and path[-1] in FORMS and "matching regex" in what:
        value = _at(document, path)
        address = OF_HUB.match(str(value)) if path[-1] == "hf" else None
        meant = f" (did you mean {address['reference']}?)" if address else ""
        return f"{value!r:.80} {FORMS[str(path[-1])]}{meant}"
    if not path and document is None:
        return "it is empty; write a list of `models` into it"
    return what[:1].lower() + what[1:]


def _meant(what: str, path: tuple[Step, ...], kind: Any) -> str | None:
    """Return the field that was meant by an unknown one: one that its place has, or else another of the document's
    fields. None: that can't be guessed, or none is unknown."""
    unknown = _UNKNOWN.match(what)
    if unknown is None:
        return None
    whole: tuple[msgspec.inspect.Type, ...] = (msgspec.inspect.type_info(kind),)
    there = whole
    for step in path:
        there = tuple(inner for one in there for inner in _inner(one, step))
    for known in (_fields(there, {}), _fields(whole, {}, deep=True)):
        beginning = [name for name in sorted(known) if len(unknown[1]) > 2 and name.startswith(unknown[1])]
        if close := difflib.get_close_matches(unknown[1], sorted(known), n=1) or beginning:
            return close[0]
    return None


def _inner(kind: msgspec.inspect.Type, step: Step | None) -> Iterator[msgspec.inspect.Type]:
    """Yield the types that a value of this type may have at a step inwards; None: at any."""
    match kind:
        case msgspec.inspect.Metadata(type=inner):
            yield from _inner(inner, step)
        case msgspec.inspect.UnionType(types=several):
            for one in several:
                yield from _inner(one, step)
        case msgspec.inspect.StructType(fields=fields):
            yield from (field.type for field in fields if step in (None, field.encode_name))
        case msgspec.inspect.DictType(value_type=inner) | msgspec.inspect.CollectionType(item_type=inner):
            yield inner


def _fields(kinds: Iterable[msgspec.inspect.Type], known: dict[str, None], *, deep: bool = False) -> dict[str, None]:
    """Add the names of the fields that values of these types have to `known`, `deep`: with those within; return it."""
    for kind in kinds:
        match kind:
            case msgspec.inspect.Metadata(type=inner):
                _fields((inner,), known, deep=deep)
            case msgspec.inspect.UnionType(types=several):
                _fields(several, known, deep=deep)
            case msgspec.inspect.StructType(fields=fields):
                known.update(dict.fromkeys(field.encode_name for field in fields))
                if deep:
                    _fields(_inner(kind, None), known, deep=True)
            case _ if deep:
                _fields(_inner(kind, None), known, deep=True)
    return known


def _without(document: Any, path: tuple[Step, ...], what: str) -> tuple[Step, ...] | None:
    """Take what msgspec complains of out of a document; return its path, or None if that can't be."""
    unknown = _UNKNOWN.match(what)
    target = (*path, unknown[1]) if unknown is not None else path
    if len(path) > 1 and (_MISSING.match(what) or (unknown is None and len(path) == 2)):
        # What is missing can't be made up, nor what is wrong with an entry as a whole: the whole entry goes, and what
        # else is wrong with it is told next time.
        place = _at(document, path[:1])
        if path[0] == "models" and isinstance(place, list) and isinstance(path[1], int):
            place[path[1]] = {"name": f"entry-{path[1]}", "path": "x.gguf"}
            return path
    parent = _at(document, target[:-1]) if target else None
    if isinstance(parent, dict) and target[-1] in parent:
        del parent[target[-1]]
        return target
    return None
