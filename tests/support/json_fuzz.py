"""Documents that are almost what a JSON Schema wants, for hypothesis: most values fit, some miss by one or by far."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from pydantic import BaseModel

Values = st.SearchStrategy[Any]

WEIRD = ["\x00", "\u2028", "😀", "<|im_end|>", "{{ 1/0 }}", "../../etc/passwd", "%00", "a" * 3000]
EDGES = [0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**40]
MAX_DEPTH = 5

junk: Values = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from(EDGES)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(WEIRD),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def like(schema: Mapping[str, Any], defs: Mapping[str, Any], depth: int = 0) -> Values:
    """Values of about this schema."""
    if depth > MAX_DEPTH or not schema:
        return junk
    if "$ref" in schema:
        return like(defs[schema["$ref"].rsplit("/", 1)[-1]], defs, depth + 1)
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return st.one_of([like(kind, defs, depth + 1) for kind in schema[union]])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    return _of_type(schema, defs, depth)


def _of_type(schema: Mapping[str, Any], defs: Mapping[str, Any], depth: int) -> Values:
    match schema.get("type"):
        case "boolean":
            return st.booleans()
        case "integer":
            low, high = schema.get("minimum", -2), schema.get("maximum", 2**31)
            return st.integers(low, min(high, low + 40)) | st.sampled_from([low - 1, high + 1, *EDGES])
        case "number":
            low, high = schema.get("minimum", -2), schema.get("maximum", 2)
            return st.floats(low, high) | st.sampled_from([low, high, low - 1, high + 1, 1e300, 1e-300])
        case "string":
            return st.text(max_size=12) | st.sampled_from(["auto", "none", "text", "function", "user", "stop", *WEIRD])
        case "array":
            items = like(schema.get("items", {}), defs, depth + 1)
            return st.lists(items, max_size=3) | st.lists(items, min_size=1, max_size=1).map(lambda one: one * 200)
        case "object":
            named = {name: like(kind, defs, depth + 1) for name, kind in schema.get("properties", {}).items()}
            required = set(schema.get("required", ()))
            return st.fixed_dictionaries(
                {name: kind for name, kind in named.items() if name in required},
                optional={name: kind for name, kind in named.items() if name not in required},
            ) | st.dictionaries(st.text(max_size=5), junk, max_size=3)
        case "null":
            return st.none()
        case _:
            return junk


@st.composite
def bodies(draw: st.DrawFn, model: type[BaseModel], fitting: Mapping[str, Any], more: tuple[str, ...] = ()) -> bytes:
    """Requests of this body: what must be there mostly as in `fitting`, a few other fields, `more` names of fields.

    One in eight is damaged as text.
    """
    schema = model.model_json_schema()
    named, defs = schema["properties"], schema.get("$defs", {})
    document = {name: value for name, value in fitting.items() if name in named}
    names = [name for name in named if name != "model"] + list(more)
    for name in draw(st.lists(st.sampled_from(names), max_size=4, unique=True)):
        values = like(named[name], defs) if name in named else junk
        document[name] = draw(values if draw(st.integers(0, 4)) else junk)
    raw = json.dumps(document, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    return damaged(draw, raw) if draw(st.integers(0, 7)) == 0 else raw


def damaged(draw: st.DrawFn, raw: bytes) -> bytes:
    """Cut off, with another byte in it, or deep where it was flat."""
    position = draw(st.integers(0, len(raw)))
    how = draw(st.sampled_from(["cut", "byte", "deep", "twice"]))
    if how == "cut":
        return raw[:position]
    if how == "byte":
        return raw[:position] + draw(st.binary(min_size=1, max_size=2)) + raw[position + 1 :]
    if how == "deep":
        return raw[:position] + b'[{"a":' * 5000 + raw[position:]
    return raw + raw
