"""Works out what JSON Schema has and a grammar can't express: whether schemas exclude each other, and `uniqueItems`.

A grammar does not remember the items of an array. For `uniqueItems` with at most four possible values of items, all
arrays without repeats are listed. If there are more values but they are known, an array may have no more items than
there are values. Otherwise the keyword is not enforced.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any
from urllib.parse import unquote

MAX_PAIRS = 2_000
MAX_HOPS = 16
MAX_COMPARED = 20_000
"""Maximum number of pairs of schemas compared for one answer, all its tools and parameters together; further pairs
count as not excluding each other. If properties refer to each other, a pair is compared once for each path to it."""
PER_COMPARISON = 16
"""Comparing this many values, or property names, counts against `MAX_COMPARED` like comparing one pair of schemas."""

_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})


@dataclass(slots=True)
class Comparisons:
    """Counts how many more pairs of schemas may be compared for one answer."""

    left: int = MAX_COMPARED


class Disjoint:
    """Finds out which schemas of a document exclude each other. References are looked up in `root`, the document."""

    def __init__(self, root: Any, comparisons: Comparisons | None = None) -> None:
        self._root = root
        self._comparisons = comparisons or Comparisons()
        self._targets: dict[str, Any] = {}
        """Reference -> the schema it leads to. Each is looked up once: a reference can be as long as the document."""
        self._required: dict[int, frozenset[str]] = {}
        self._types: dict[int, frozenset[str]] = {}
        self._values: dict[int, frozenset[str] | None] = {}
        """`id()` of a schema -> the values it lists. Each list is read once: it can be long, and its schema shared."""

    def all(self, schemas: Any) -> bool:
        """Return whether no value can satisfy two of these schemas."""
        if not isinstance(schemas, Sequence) or len(schemas) * len(schemas) > 2 * MAX_PAIRS:
            return False
        return all(self.two(a, b, MAX_HOPS) for a, b in combinations(schemas, 2))

    def two(self, a: Any, b: Any, hops: int) -> bool:
        self._comparisons.left -= 1
        if self._comparisons.left < 0:
            return False
        a, b = self._target(a), self._target(b)
        if a is False or b is False:
            return True
        if hops <= 0 or not isinstance(a, dict) or not isinstance(b, dict):
            return False
        common = self._types_of(a) & self._types_of(b)
        if not common:
            return True
        values_a, values_b = self._values_of(a), self._values_of(b)
        if values_a is not None and values_b is not None:
            self._comparisons.left -= min(len(values_a), len(values_b)) // PER_COMPARISON
            return values_a.isdisjoint(values_b)
        return common == {"object"} and self._objects(a, b, hops)

    def _types_of(self, schema: dict[str, Any]) -> frozenset[str]:
        if id(schema) not in self._types:
            self._types[id(schema)] = _types(schema)
        return self._types[id(schema)]

    def _values_of(self, schema: dict[str, Any]) -> frozenset[str] | None:
        if id(schema) not in self._values:
            self._values[id(schema)] = _values(schema)
        return self._values[id(schema)]

    def _objects(self, a: dict[str, Any], b: dict[str, Any], hops: int) -> bool:
        must_a, must_b = self._required_of(a), self._required_of(b)
        self._comparisons.left -= (len(must_a) + len(must_b)) // PER_COMPARISON
        if any(_closed_to(b, name) for name in must_a) or any(_closed_to(a, name) for name in must_b):
            return True
        parts_a, parts_b = _properties(a), _properties(b)
        shared = [name for name in must_a & must_b if name in parts_a and name in parts_b]
        return any(self.two(parts_a[name], parts_b[name], hops - 1) for name in shared)

    def _required_of(self, schema: dict[str, Any]) -> frozenset[str]:
        if id(schema) not in self._required:
            self._required[id(schema)] = _required(schema)
        return self._required[id(schema)]

    def _target(self, schema: Any) -> Any:
        """Return the schema that a `$ref` leads to; without `$ref`, the schema itself; None if the reference leads
        nowhere, or through more than MAX_HOPS references."""
        for _ in range(MAX_HOPS):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                return schema
            reference = schema["$ref"]
            if reference not in self._targets:
                self._targets[reference] = _found(self._root, reference)
            schema = self._targets[reference]
        return None


def _found(root: Any, reference: str) -> Any:
    """Return the schema in a document that a reference points to; None: there is none."""
    if not reference.startswith("#/"):
        return None
    schema = root
    for part in reference[2:].split("/"):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if not isinstance(schema, dict) or name not in schema:
            return None
        schema = schema[name]
    return schema


def _types(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that a schema's values may have; integers count as numbers."""
    kinds = _TYPES
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        kinds = frozenset("number" if kind == "integer" else str(kind) for kind in named)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return kinds & frozenset(map(_type, values)) if isinstance(values, list) else kinds


def _type(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int | float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def _values(schema: dict[str, Any]) -> frozenset[str] | None:
    """Return the values that a schema lists, each as a text: equal values have equal texts. None: it lists none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset(map(_text, values)) if isinstance(values, list) else None


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _required(schema: dict[str, Any]) -> frozenset[str]:
    names = schema.get("required")
    return frozenset(map(str, names)) if isinstance(names, list) else frozenset()


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    parts = schema.get("properties")
    return parts if isinstance(parts, dict) else {}


def _closed_to(schema: dict[str, Any], name: str) -> bool:
    """Return whether an object with a property of this name can't satisfy the schema."""
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return is_closed and name not in _properties(schema)


MAX_ARRANGED = 4
"""Maximum number of possible values for which all arrays without repeats are listed: 4 values make 65 arrays, 5 would
make 326."""
MAX_REFERENCES = 8
"""Maximum number of references that are followed one after the other."""

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
    """Return the keyword and name of the definition that a reference points to; None: it points to something else."""
    parts = reference.split("/", 3) if isinstance(reference, str) else []
    if len(parts) < 3 or parts[0] != "#" or parts[1] not in ("$defs", "definitions"):
        return None
    return parts[1], unquote(parts[2]).replace("~1", "/").replace("~0", "~")


class Values:
    """Finds out which values a schema of one document lists. Each list is read only once, however often it is referred
    to: a document of 256 KiB has room for a hundred thousand values and for thousands of references."""

    def __init__(self, root: Any) -> None:
        """`root` is the document, which must not change."""
        self._root = root
        self._known: dict[int, list[Any] | None] = {}
        """`id()` of a schema -> the values that it lists; None: it lists none."""
        self._places: dict[str, tuple[str, str] | None] = {}
        """Reference -> the definition it points to. Each reference is read once: it may be as long as the document."""

    def of(self, schema: Any) -> list[Any] | None:
        """Return the values that a schema allows, each once; None: the schema does not list them."""
        root = self._root
        for _ in range(MAX_REFERENCES):
            place = self._place(schema["$ref"]) if isinstance(schema, dict) and "$ref" in schema else None
            if place is None or not schema.keys() <= ANNOTATIONS | {"$ref"}:
                break
            section = root.get(place[0]) if isinstance(root, dict) else None
            schema = section.get(place[1]) if isinstance(section, dict) else None
        if not isinstance(schema, dict):
            return None
        if id(schema) not in self._known:
            self._known[id(schema)] = _listed(schema)
        return self._known[id(schema)]

    def _place(self, reference: Any) -> tuple[str, str] | None:
        if not isinstance(reference, str):
            return None
        if reference not in self._places:
            self._places[reference] = place_of(reference)
        return self._places[reference]

    def unique_arrays(self, schema: dict[str, Any]) -> list[list[Any]] | None:
        """Return all arrays that an array schema with `uniqueItems` allows, the shortest first. Return None for any
        other schema, and if the values of the items are not listed, or are more than MAX_ARRANGED."""
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
