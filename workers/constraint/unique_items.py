"""Support for `uniqueItems` in a grammar: exact where few values are possible, a bound on the length where more are.

A grammar does not remember the items that came. For items of up to four values, all arrays without repeats are listed.
Where the values are known, an array is no longer than there are values. Else the keyword is not enforced.
"""

from __future__ import annotations

import itertools
import json
from typing import Any
from urllib.parse import unquote

MAX_ARRANGED = 4
"""Most values whose arrays are listed, 65 of them; one value more makes 326."""
MAX_REFERENCES = 8
"""Most references that are followed one after the other."""

ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment"})
ARRAY_KEYWORDS = ANNOTATIONS | {"type", "items", "minItems", "maxItems", "uniqueItems"}
VALUE_KEYWORDS = ANNOTATIONS | {"type", "enum", "const"}
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def place_of(reference: Any) -> tuple[str, str] | None:
    """Return the keyword and the name of the definition that a reference means; None: it means something else."""
    parts = str(reference).split("/")
    if len(parts) < 3 or parts[0] != "#" or parts[1] not in ("$defs", "definitions"):
        return None
    return parts[1], unquote(parts[2]).replace("~1", "/").replace("~0", "~")


class Values:
    """The values that the schemas of one document list. Each list is read once, however often it is referred to: a
    document of 256 KiB has room for a hundred thousand values and for thousands of references.
    """

    def __init__(self, root: Any) -> None:
        """`root` is the document, which must not change."""
        self._root = root
        self._known: dict[int, list[Any] | None] = {}
        """Values by the schema's identity."""

    def of(self, schema: Any) -> list[Any] | None:
        """Return the values that a schema allows, each once; None: they are many, or it can't be told."""
        root = self._root
        for _ in range(MAX_REFERENCES):
            place = place_of(schema["$ref"]) if isinstance(schema, dict) and "$ref" in schema else None
            if place is None or not schema.keys() <= ANNOTATIONS | {"$ref"}:
                break
            shelf = root.get(place[0]) if isinstance(root, dict) else None
            schema = shelf.get(place[1]) if isinstance(shelf, dict) else None
        if not isinstance(schema, dict):
            return None
        if id(schema) not in self._known:
            self._known[id(schema)] = _listed(schema)
        return self._known[id(schema)]

    def unique_arrays(self, schema: dict[str, Any]) -> list[list[Any]] | None:
        """Return all arrays that a schema of an array without repeats allows, the shortest first; None: it is another
        schema, or they are many.
        """
        asks = schema.get("uniqueItems") is True and schema.get("type") == "array"
        if not asks or not schema.keys() <= ARRAY_KEYWORDS:
            return None
        values = self.of(schema.get("items"))
        if values is None or len(values) > MAX_ARRANGED:
            return None
        least, most = schema.get("minItems", 0), schema.get("maxItems", len(values))
        if not isinstance(least, int) or not isinstance(most, int) or least > min(most, len(values)):
            return None
        lengths = range(max(0, least), min(most, len(values)) + 1)
        return [list(one) for length in lengths for one in itertools.permutations(values, length)]


def _listed(schema: dict[str, Any]) -> list[Any] | None:
    if not schema.keys() <= VALUE_KEYWORDS:
        return None
    kind = schema.get("type")
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if listed is None:
        listed = {"boolean": [False, True], "null": [None]}.get(kind) if isinstance(kind, str) else None
    if not isinstance(listed, list) or ("const" in schema and "enum" in schema):
        return None
    if kind is not None and not all(_is_of(value, kind) for value in listed):
        return None
    return list({json.dumps(value, sort_keys=True): value for value in listed}.values())


def _is_of(value: Any, kind: Any) -> bool:
    types = TYPES.get(kind, ()) if isinstance(kind, str) else ()
    return isinstance(value, types) and (isinstance(value, bool) == (kind == "boolean"))
