from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest

from workers.constraint.languages.schema import (
    ANNOTATIONS,
    HARMLESS,
    LISTS,
    MAPS,
    MAX_BYTES,
    ONE,
    PLAIN,
    enforceable,
    parse,
)
from workers.constraint.mask import Unusable


@pytest.mark.parametrize(
    "keyword",
    [
        {"not": {"type": "string"}},
        {"if": {"type": "string"}, "then": {"maxLength": 3}},
        {"contains": {"const": 1}},
        {"minContains": 2},
        {"dependentRequired": {"a": ["b"]}},
        {"dependentSchemas": {"a": {"required": ["b"]}}},
        {"dependencies": {"a": ["b"]}},
        {"unevaluatedProperties": False},
        {"unevaluatedItems": False},
        {"propertyNames": {"maxLength": 3}},
        {"$dynamicRef": "#a"},
        {"format": "credit-card"},
        {"format": "regex", "type": "string"},
        {"requierd": ["a"]},
        {"x-guidance": {"lenient": True}},
    ],
)
@pytest.mark.parametrize("around", ["{}", "property", "item", "anyOf", "definition"])
def test_what_can_not_be_enforced_is_refused_by_name(keyword: dict[str, Any], around: str) -> None:
    schema: dict[str, Any] = {
        "{}": keyword,
        "property": {"type": "object", "properties": {"p": keyword}},
        "item": {"type": "array", "items": keyword},
        "anyOf": {"anyOf": [{"type": "integer"}, keyword]},
        "definition": {"$ref": "#/$defs/d", "$defs": {"d": keyword}},
    }[around]
    with pytest.raises(Unusable, match=f"`{next(iter(keyword)).replace('$', '.')}`"):
        enforceable(schema)


def test_what_says_nothing_about_values_is_left_out() -> None:
    schema = {
        "title": "t",
        "description": "d",
        "type": "object",
        "default": {},
        "x-order": 1,
        "uniqueItems": False,
        "properties": {"title": {"type": "string", "examples": ["a"]}, "not": {"const": 1}},
        "$defs": {"unused": {"not": {}}},
    }
    expected = {"type": "object", "properties": {"title": {"type": "string"}, "not": {"const": 1}}}
    assert enforceable(schema) == expected


def test_definitions_are_followed_only_where_they_are_used() -> None:
    schema = {
        "$ref": "#/$defs/a~1b",
        "$defs": {"a/b": {"type": "array", "items": {"$ref": "#/$defs/c"}}, "c": {"type": "null"}, "d": {"not": {}}},
    }
    assert set(enforceable(schema)["$defs"]) == {"a/b", "c"}


def test_a_definition_that_refers_to_itself_ends() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    assert enforceable({"$ref": "#/$defs/node", "$defs": {"node": node}})["$defs"] == {"node": node}


@pytest.mark.parametrize(
    ("parts", "alike"),
    [
        ([{"type": "integer"}, {"type": "string"}], True),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"const": "a"}, {"enum": ["b", "c"]}], True),
        ([{"const": 1}, {"const": 1.0}], False),
        ([{"const": 1}, {"const": True}], True),
        (
            [
                {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
                for kind in ("circle", "square", "line")
            ],
            True,
        ),
        ([{"type": "object", "properties": {"kind": {"const": kind}}} for kind in ("circle", "square")], False),
        (
            [
                {"type": "object", "required": ["a"]},
                {"type": "object", "properties": {"b": {}}, "additionalProperties": False},
            ],
            True,
        ),
        ([{"required": ["a"]}, {"required": ["b"]}], False),
        ([{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}], True),
        ([{"minimum": 3}, {"maximum": 2}], False),
    ],
)
def test_one_of_parts_that_exclude_each_other_is_any_of_them(parts: list[Any], alike: bool) -> None:
    schema = {"oneOf": parts, "$defs": {"one": {"type": "null"}, "two": {"type": "boolean"}}}
    assert ("anyOf" in enforceable(schema)) is alike
    assert ("oneOf" in enforceable(schema)) is not alike


def test_parts_that_refer_to_each_other_are_not_compared_for_ever() -> None:
    names = [f"p{n}" for n in range(6)]
    one = {"type": "object", "properties": {name: {"$ref": "#/$defs/one"} for name in names}, "required": names}
    schema = {"$defs": {"one": one}, "oneOf": [{"$ref": "#/$defs/one"}, one]}
    start = time.thread_time()
    assert "oneOf" in enforceable(schema)
    assert time.thread_time() - start < 5


def test_formats_of_numbers_are_bounds() -> None:
    assert enforceable({"type": "integer", "format": "int32", "minimum": 0}) == {
        "type": "integer",
        "minimum": 0,
        "maximum": 2**31 - 1,
    }
    assert enforceable({"type": "number", "format": "double"}) == {"type": "number"}


def test_property_names_by_a_pattern() -> None:
    schema = {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]+$"},
        "additionalProperties": {"type": "integer", "title": "t"},
    }
    assert enforceable(schema) == {
        "type": "object",
        "patternProperties": {"^[a-z]+$": {"type": "integer"}},
        "additionalProperties": False,
    }


def test_bounds() -> None:
    deep: Any = {"type": "integer"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(Unusable, match="levels deep"):
        enforceable(deep)
    with pytest.raises(Unusable, match="256 KiB"):
        parse(" " * (MAX_BYTES + 1))
    with pytest.raises(Unusable, match="no JSON"):
        parse("{")
    with pytest.raises(Unusable, match="no JSON"):
        parse("[" * 100_000)
    with pytest.raises(Unusable, match="neither an object"):
        enforceable([1])


LISTED = {"properties": {"a": {"type": "string"}}}
CLOSED = {**LISTED, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        (LISTED, CLOSED),
        ({"properties": {"inner": LISTED}}, {"properties": {"inner": CLOSED}, "additionalProperties": False}),
        ({"type": "array", "items": LISTED}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [LISTED, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [LISTED]}, {"allOf": [CLOSED]}),
        ({"$ref": "#/$defs/d", "$defs": {"d": LISTED}}, {"$ref": "#/$defs/d", "$defs": {"d": CLOSED}}),
        # The schema says itself what else there may be, or that there must be more.
        ({"type": "object"}, {"type": "object"}),
        ({**LISTED, "additionalProperties": True}, {**LISTED, "additionalProperties": True}),
        ({**LISTED, "required": ["b"]}, {**LISTED, "required": ["b"]}),
        ({**LISTED, "minProperties": 2}, {**LISTED, "minProperties": 2}),
        # Keys of one schema may be listed by another one that holds for the same object.
        ({"allOf": [LISTED, {"required": ["b"]}]}, {"allOf": [LISTED, {"required": ["b"]}]}),
        ({**LISTED, "anyOf": [LISTED, {"type": "object"}]}, {**LISTED, "anyOf": [LISTED, {"type": "object"}]}),
        ({"allOf": [{"anyOf": [LISTED]}, LISTED]}, {"allOf": [{"anyOf": [LISTED]}, LISTED]}),
        (
            {**LISTED, "$ref": "#/$defs/d", "$defs": {"d": LISTED}},
            {**LISTED, "$ref": "#/$defs/d", "$defs": {"d": LISTED}},
        ),
        (
            {"allOf": [{"properties": {"b": LISTED}}, LISTED]},
            {"allOf": [{"properties": {"b": CLOSED}}, LISTED]},
        ),
    ],
)
def test_objects_end_after_the_keys_that_are_listed(schema: dict[str, Any], kept: dict[str, Any]) -> None:
    assert enforceable(schema, closes=True) == kept
    assert enforceable(schema) == schema


def test_a_definition_is_open_if_one_that_uses_it_needs_that() -> None:
    """In whichever order they come."""
    alone, joined = {"$ref": "#/$defs/d"}, {"allOf": [{"$ref": "#/$defs/d"}, {"required": ["b"]}]}
    for parts in ([alone, joined], [joined, alone]):
        schema = {"type": "array", "prefixItems": parts, "$defs": {"d": LISTED}}
        assert enforceable(schema, closes=True) == schema


def test_nothing_is_closed_where_it_can_not_be_told() -> None:
    schema = {"properties": {"a": LISTED, "b": {"allOf": [{"$ref": "#/properties/a"}, LISTED]}}}
    assert enforceable(schema, closes=True) == schema


COLOURS = {"enum": ["red", "green"]}


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        ({"items": COLOURS}, {"enum": [[], ["red"], ["green"], ["red", "green"], ["green", "red"]]}),
        ({"items": COLOURS, "minItems": 2, "maxItems": 9}, {"enum": [["red", "green"], ["green", "red"]]}),
        ({"items": {"type": "boolean"}, "minItems": 1, "maxItems": 1}, {"enum": [[False], [True]]}),
        ({"items": {"const": 1}, "title": "t"}, {"enum": [[], [1]]}),
        # Of more values as many as there are, of any others as many as the model likes.
        ({"items": {"enum": [1, 2, 3, 4, 5]}}, {"type": "array", "items": {"enum": [1, 2, 3, 4, 5]}, "maxItems": 5}),
        (
            {"items": {"enum": [1, 2, 3, 4, 4, 5]}, "maxItems": 2},
            {"type": "array", "items": {"enum": [1, 2, 3, 4, 4, 5]}, "maxItems": 2},
        ),
        ({"items": {"type": "string"}}, {"type": "array", "items": {"type": "string"}}),
        (
            {"items": {"type": "integer", "enum": ["red"]}},
            {"type": "array", "items": {"type": "integer", "enum": ["red"]}},
        ),
        ({}, {"type": "array"}),
    ],
)
def test_items_that_are_unique(schema: dict[str, Any], kept: dict[str, Any]) -> None:
    assert enforceable({"type": "array", "uniqueItems": True, **schema}) == kept


def test_unique_items_that_are_defined_elsewhere() -> None:
    """As pydantic writes a set of an enumeration's members."""
    schema = {"properties": {"c": {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/C"}}}}
    definitions = {"C": {"enum": ["red", "green"], "title": "C", "type": "string"}}
    kept = enforceable({**schema, "$defs": definitions})
    assert len(kept["properties"]["c"]["enum"]) == 5


def test_long_lists_of_values_are_looked_at_once() -> None:
    """A list of 60,000 values was read anew for each of the arrays that refer to it: ten minutes of one thread."""
    values = ["0,", "1,", "2,", "3,", "4,"]
    listed = "[" + "".join(values) * 12_000 + "5]"
    arrays = ",".join(['{"type":"array","uniqueItems":true,"items":{"$ref":"#/$defs/e"}}'] * 2000)
    text = f'{{"$defs":{{"e":{{"enum":{listed}}}}},"type":"array","prefixItems":[{arrays}]}}'
    start = time.thread_time()
    made = enforceable(parse(text))
    assert time.thread_time() - start < 2
    assert made["prefixItems"][-1]["maxItems"] == 6


def test_long_lists_of_values_are_compared_within_bounds() -> None:
    lists = [{"enum": [f"{first}{number}" for number in range(8000)]} for first in "ab"]
    parts = [{"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}] * 2000
    schema = {"$defs": dict(zip("ab", lists, strict=True)), "type": "array", "prefixItems": parts}
    start = time.thread_time()
    enforceable(schema)
    assert time.thread_time() - start < 2


def same(number: int, names: list[str], schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with `number` choices between an object and itself, and with `names` for its parts, all `schema`."""
    whole = {"type": "object", "properties": {name: {"$ref": "#/$defs/part"} for name in names}, "required": names}
    choice = {"oneOf": [{"$ref": "#/$defs/whole"}, {"$ref": "#/$defs/whole"}]}
    return {"$defs": {"whole": whole, "part": schema}, "type": "array", "prefixItems": [choice] * number}


@pytest.mark.parametrize(
    "part",
    [
        {"$ref": "#/" + "/" * 150_000},
        {"type": "object", "required": [f"{number:x}" for number in range(20_000)]},
    ],
)
def test_what_is_long_is_not_read_in_each_comparison(part: dict[str, Any]) -> None:
    """A reference of 150 KB, and 20,000 names of properties, were: five minutes of a thread for 185 KB."""
    began = time.process_time()
    enforceable(parse(json.dumps(same(5, [f"p{number}" for number in range(1_000)], part))))
    assert time.process_time() - began < 2


@pytest.mark.parametrize("name", ["x" + "/" * 150_000, "%41" * 50_000])
def test_a_long_reference_is_read_once_however_many_arrays_follow_it(name: str) -> None:
    part = {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/x"}}
    schema = {"$defs": {"x": {"$ref": f"#/$defs/{name}"}}, "type": "array", "prefixItems": [part] * 1_000}
    began = time.process_time()
    enforceable(parse(json.dumps(schema)))
    assert time.process_time() - began < 2


ODD: tuple[Any, ...] = ([], {}, [[]], [{}], "a", None, 1.5, True, {"a": []}, [1, "a"])
KINDS: tuple[Any, ...] = ("integer", "string", "array", "object", [])


@pytest.mark.parametrize("keyword", sorted(PLAIN | ANNOTATIONS | ONE | LISTS | MAPS | HARMLESS.keys() | {"format"}))
def test_a_keyword_with_a_value_of_another_kind_is_the_callers_mistake(keyword: str) -> None:
    """It was a fault of the worker, which gateways then blamed and tried elsewhere."""
    for value in ODD:
        for kind in KINDS:
            schema = {"type": kind, keyword: value, "uniqueItems": True, "items": {keyword: value}}
            with contextlib.suppress(Unusable):
                enforceable({"properties": {"a": schema, "b": {"oneOf": [schema, {"type": kind}]}}}, closes=True)
