"""Checks whether a JSON Schema can be enforced exactly, and brings it into llguidance's form.

Each keyword must be one that llguidance enforces, or an annotation that says nothing about values; any other keyword is
refused with its name and place. Source: JSON Schema 2020-12 (core and validation), docs/json_schema.md of llguidance.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from workers.constraint.languages.schema_rules import Comparisons, Disjoint, Values, place_of
from workers.constraint.mask import Unusable

logger = logging.getLogger(__name__)

MAX_BYTES = 256 << 10
MAX_DEPTH = 100
MAX_NODES = 20_000

ONE = frozenset({"additionalProperties", "additionalItems"})
"""Keywords whose value is one schema."""
LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
PLAIN = frozenset(
    {
        *("type", "enum", "const", "required", "minProperties", "maxProperties", "minItems", "maxItems", "minLength"),
        *("maxLength", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("$ref", "$schema", "$id", "id", "$anchor"),
    }
)
ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "$comment", "readOnly", "writeOnly", "deprecated"),
        *("contentEncoding", "contentMediaType", "contentSchema", "$vocabulary"),
        # From OpenAPI and editors: they loosen or describe, and never forbid a value.
        *("nullable", "discriminator", "xml", "externalDocs", "markdownDescription", "propertyOrdering"),
    }
)
HARMLESS: Mapping[str, tuple[object, ...]] = {
    "unevaluatedProperties": (True,),
    "unevaluatedItems": (True,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "not": (False,),
    "minContains": (0,),
}
"""Keywords that are refused except with these values, which demand nothing."""

OBJECT_KEYWORDS = frozenset({"properties", "patternProperties", "additionalProperties", "required", "minProperties"})
OPENING = frozenset({"additionalProperties", "unevaluatedProperties", "propertyNames"})
"""Keywords by which a schema itself decides which keys its objects may have besides those in `properties`."""

STRING_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_YEAR = r"(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = rf"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
EXACT_FORMATS: Mapping[str, str] = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Patterns that match only days that exist; llguidance's own match 29 February in every year. Source: RFC 3339."""

NUMBER_FORMATS: Mapping[str, tuple[int, int] | None] = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "float": None,
    "double": None,
}
"""OpenAPI's formats of numbers, with the bounds that they set; None: no bounds."""


def parse(text: str) -> Any:
    """Return the schema in a JSON text. Raises Unusable if the text is too large, nested too deep or not JSON."""
    if len(text.encode()) > MAX_BYTES:
        raise Unusable(f"the schema has more than {MAX_BYTES >> 10} KiB; send a smaller one")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"the schema is no JSON that can be read: {error}") from None


def enforceable(schema: Any, *, closes: bool = False, comparisons: Comparisons | None = None) -> Any:
    """Return the schema without annotations, in llguidance's form. Raises Unusable with the keyword that can't be
    enforced.

    `closes`: allow objects only the keys that their schema lists, unless it says which others they may have.
    `comparisons`: how many comparisons of two schemas are left for the answer; None: as many as an answer may have."""
    comparisons = comparisons or Comparisons()
    reader = _Reader(schema, closes, comparisons)
    try:
        result = reader.read()
        return _Reader(schema, closes=False, comparisons=comparisons).read() if reader.is_unclear else result
    except Unusable:
        raise
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        # A value of a wrong type is the caller's mistake, not this worker's.
        logger.warning("a schema could not be read: %r", error)
        raise Unusable("a keyword of the schema has a value of a kind that it can't have; correct it") from None


class _Reader:
    """Walks through one schema. A definition is read only if something refers to it."""

    def __init__(self, root: Any, closes: bool, comparisons: Comparisons) -> None:
        self._root = root
        self._closes = closes
        self._disjoint = Disjoint(root, comparisons)
        self._values = Values(root)
        self._wanted: list[tuple[str, str, bool]] = []
        """Definitions to read: section, name, and whether their values must satisfy another schema as well."""
        self._num_nodes = 0
        self.is_unclear = False
        """Whether it is unknown which schemas may forbid unlisted keys: a `$ref` leads to something other than a
        definition, and its value must satisfy another schema, too."""

    def read(self) -> Any:
        result = self._schema(self._root, "the schema", 0, is_root=True)
        done: dict[tuple[str, str], bool] = {}
        while self._wanted:
            section, name, joined = self._wanted.pop()
            definition = self._definition(section, name)
            if definition is None or done.get((section, name)) in (True, joined):
                continue  # llguidance reports a missing definition
            done[section, name] = joined
            schema = self._schema(definition, f"`{section}/{name}`", 2, joined=joined)
            result.setdefault(section, {})[name] = schema
        return result

    def _definition(self, section: str, name: str) -> Any:
        definitions = self._root.get(section) if isinstance(self._root, dict) else None
        return definitions.get(name) if isinstance(definitions, dict) else None

    def _schema(self, schema: Any, path: str, depth: int, *, is_root: bool = False, joined: bool = False) -> Any:
        """Return a schema for llguidance. `joined`: another schema, with its own keys, applies to the same value."""
        self._num_nodes += 1
        if depth > MAX_DEPTH or self._num_nodes > MAX_NODES:
            raise Unusable(f"the schema is nested more than {MAX_DEPTH} levels deep or has more than {MAX_NODES} parts")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise Unusable(f"{path} is neither an object nor true or false")
        arrangements = self._values.unique_arrays(schema)
        if arrangements is not None:
            return {"enum": arrangements}
        out: dict[str, Any] = {}
        joined = joined or _num_parts(schema) > 1
        if self._closes and not joined and _is_listed(schema):
            out["additionalProperties"] = False
        for key, value in schema.items():
            if is_root and key in ("$defs", "definitions"):
                continue
            if joined and key in (*LISTS, "$ref"):
                self._joined(schema, key, value, out, path, depth)
            else:
                self._keyword(schema, key, value, out, path, depth)
        return out

    def _joined(self, schema: dict[str, Any], key: str, value: Any, out: dict[str, Any], path: str, depth: int) -> None:
        """Read a keyword such as `anyOf` or `$ref`, whose schemas apply to the same value as another schema."""
        if key == "$ref":
            out[key] = value
            self._refer(value, joined=True)
        else:
            self._alternatives(schema, key, value, out, path, depth, joined=key != "prefixItems")

    def _alternatives(
        self,
        schema: dict[str, Any],
        key: str,
        value: Any,
        out: dict[str, Any],
        path: str,
        depth: int,
        *,
        joined: bool = False,
    ) -> None:
        schemas = self._list(key, value, path, depth, joined=joined)
        # If schemas exclude each other, `oneOf` means the same as `anyOf`.
        alike = key == "oneOf" and "anyOf" not in schema and self._disjoint.all(value)
        out["anyOf" if alike else key] = schemas

    def _keyword(
        self, schema: dict[str, Any], key: str, value: Any, out: dict[str, Any], path: str, depth: int
    ) -> None:
        if key in out:
            return  # `propertyNames` has replaced it
        if key in PLAIN:
            out[key] = value
            if key == "$ref":
                self._refer(value)
        elif key in ONE or key in ("items", "propertyNames"):
            self._nested(schema, key, value, out, path, depth)
        elif key in LISTS:
            self._alternatives(schema, key, value, out, path, depth)
        elif key in MAPS:
            if not isinstance(value, dict):
                raise Unusable(f"{path}: `{key}` is no object")
            out[key] = {name: self._schema(part, f"{path}, `{name}`", depth + 2) for name, part in value.items()}
        elif key == "format":
            _format(schema, value, out, path)
        elif key == "uniqueItems" and isinstance(value, bool):
            self._unique(schema, out, is_asked=value)
        elif key in ANNOTATIONS or (key.startswith("x-") and key != "x-guidance"):
            return
        elif not any(value == harmless and type(value) is type(harmless) for harmless in HARMLESS.get(key, ())):
            raise Unusable(
                f"the keyword `{key}` ({path}) can't be enforced; leave it out and check the answer for it yourself"
            )

    def _nested(self, schema: dict[str, Any], key: str, value: Any, out: dict[str, Any], path: str, depth: int) -> None:
        if key == "propertyNames":
            self._property_names(schema, value, out, path)
        elif isinstance(value, list):
            out[key] = self._list(key, value, path, depth)
        else:
            out[key] = self._schema(value, f"{path}, `{key}`", depth + 1)

    def _list(self, key: str, value: Any, path: str, depth: int, *, joined: bool = False) -> list[Any]:
        if not isinstance(value, list):
            raise Unusable(f"{path}: `{key}` is no array")
        return [self._schema(part, f"{path}, `{key}` {n}", depth + 2, joined=joined) for n, part in enumerate(value)]

    def _unique(self, schema: dict[str, Any], out: dict[str, Any], *, is_asked: bool) -> None:
        """Enforce `uniqueItems` as far as a grammar can: allow no more items than an item has possible values."""
        values = self._values.of(schema.get("items"))
        most = schema.get("maxItems")
        if is_asked and values is not None and not (isinstance(most, int) and most <= len(values)):
            out["maxItems"] = len(values)

    def _property_names(self, schema: dict[str, Any], value: Any, out: dict[str, Any], path: str) -> None:
        """Turn `propertyNames` into `patternProperties`. Raises Unusable if not a pattern, or beside `properties`."""
        if value in (True, {}):
            return
        others = {"properties", "patternProperties"} & set(schema)
        pattern = value.get("pattern") if isinstance(value, dict) and set(value) <= {"pattern", "type"} else None
        if others or not isinstance(pattern, str) or value.get("type", "string") != "string" or "$ref" in schema:
            raise Unusable(
                f"the keyword `propertyNames` ({path}) can be enforced only as a `pattern` beside no `properties`"
            )
        rest = schema.get("additionalProperties", True)
        out["patternProperties"] = {pattern: self._schema(rest, f"{path}, `additionalProperties`", MAX_DEPTH // 2)}
        out["additionalProperties"] = False

    def _refer(self, reference: Any, *, joined: bool = False) -> None:
        place = place_of(reference)
        if place is not None:
            self._wanted.append((*place, joined))
        elif joined:
            self.is_unclear = True


def _num_parts(schema: dict[str, Any]) -> int:
    """Return how many schemas apply to one value of `schema`: one for each of `anyOf`, `oneOf` and `$ref`, each schema
    in `allOf`, and one for the keywords of objects."""
    every = schema.get("allOf")
    num_joined = sum(key in schema for key in ("anyOf", "oneOf", "$ref"))
    return num_joined + (len(every) if isinstance(every, list) else 0) + (not OBJECT_KEYWORDS.isdisjoint(schema))


def _is_listed(schema: dict[str, Any]) -> bool:
    """Return whether a schema lists all keys of its objects, and neither mentions nor requires others."""
    listed, needed, least = schema.get("properties"), schema.get("required", ()), schema.get("minProperties", 0)
    if not isinstance(listed, dict) or not OPENING.isdisjoint(schema):
        return False
    if not isinstance(needed, list | tuple) or not isinstance(least, int) or least > len(listed):
        return False
    return all(isinstance(name, str) and name in listed for name in needed)


def _format(schema: dict[str, Any], value: Any, out: dict[str, Any], path: str) -> None:
    kind = schema.get("type")
    if not isinstance(value, str):
        raise Unusable(f"{path}: `format` is no text")
    for bound in ("minimum", "maximum"):
        if not isinstance(schema.get(bound, 0), int | float):
            raise Unusable(f"{path}: `{bound}` is no number")
    if kind in ("integer", "number") and value in NUMBER_FORMATS:
        bounds = NUMBER_FORMATS[value]
        if bounds is not None and kind == "integer":
            out["minimum"] = max(bounds[0], schema.get("minimum", bounds[0]))
            out["maximum"] = min(bounds[1], schema.get("maximum", bounds[1]))
    elif value in EXACT_FORMATS and "pattern" not in schema:
        out["pattern"] = EXACT_FORMATS[value]
    elif value in STRING_FORMATS:
        out["format"] = value
    else:
        known = ", ".join(sorted(STRING_FORMATS))
        raise Unusable(f"the keyword `format` ({path}) can't be enforced for {value!r:.40}; these can: {known}")
