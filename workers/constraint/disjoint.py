"""A check whether two JSON Schemas exclude each other, as far as that is easy to see. False means: perhaps not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from typing import Any
from urllib.parse import unquote

MAX_PAIRS = 2_000
MAX_HOPS = 16
MAX_COMPARED = 20_000
"""Most pairs compared in one document: properties that refer to each other have as many as there are ways through."""
VALUES_PER_COMPARISON = 16
"""Compared values that count as one pair of schemas."""

_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})


class Disjoint:
    """Compares the schemas of one document. `root` is the document in which references are looked up."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = MAX_COMPARED
        self._types: dict[int, frozenset[str]] = {}
        self._values: dict[int, frozenset[str] | None] = {}
        """Listed values by a schema's identity: lists are long, and may be referred to from everywhere."""

    def all(self, schemas: Any) -> bool:
        """Return whether no value can satisfy two of these schemas."""
        if not isinstance(schemas, Sequence) or len(schemas) * len(schemas) > 2 * MAX_PAIRS:
            return False
        return all(self.two(a, b, MAX_HOPS) for a, b in combinations(schemas, 2))

    def two(self, a: Any, b: Any, hops: int) -> bool:
        self._left -= 1
        if self._left < 0:
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
            self._left -= min(len(values_a), len(values_b)) // VALUES_PER_COMPARISON
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
        must_a, must_b = _required(a), _required(b)
        if any(_closed_to(b, name) for name in must_a) or any(_closed_to(a, name) for name in must_b):
            return True
        parts_a, parts_b = _properties(a), _properties(b)
        shared = must_a & must_b & set(parts_a) & set(parts_b)
        return any(self.two(parts_a[name], parts_b[name], hops - 1) for name in shared)

    def _target(self, schema: Any) -> Any:
        """Return the schema that a schema with `$ref` refers to, else itself; None: there is none, or it is too far."""
        for _ in range(MAX_HOPS):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                return schema
            reference = schema["$ref"]
            if not reference.startswith("#/"):
                return None
            schema = self._root
            for part in reference[2:].split("/"):
                name = unquote(part).replace("~1", "/").replace("~0", "~")
                if not isinstance(schema, dict) or name not in schema:
                    return None
                schema = schema[name]
        return None


def _types(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types of the values that may satisfy a schema; integers are numbers."""
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
    """Return the values that a schema lists, as texts that are equal where the values are; None if it lists none."""
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
    """Return whether an object with this property can't satisfy the schema."""
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return is_closed and name not in _properties(schema)
