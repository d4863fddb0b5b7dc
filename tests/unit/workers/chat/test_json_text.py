"""JSON as models write it: valid JSON stays what it is, anything else becomes JSON, whatever the cut."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.workers.chat.reading import cuts
from workers.chat.tools.json_text import MAX_DEPTH, JsonText
from workers.chat.tools.typed_text import json_of, kinds_of


def passed_on(portions: Iterable[str], *, parameters: Sequence[str] | None = None) -> tuple[str, str]:
    """What came out, closing included, and what was left."""
    value, waiting, out = JsonText(parameters=parameters), "", ""
    for portion in portions:
        waiting += portion
        more, reached = value.feed(waiting, 0, ended=False)
        out, waiting = out + more, waiting[reached:]
    more, reached = value.feed(waiting, 0, ended=True)
    return out + more + value.close(), waiting[reached:]


def repair(text: str, *, parameters: Sequence[str] | None = None) -> tuple[str, str]:
    outcomes = {passed_on(portions, parameters=parameters) for portions in cuts(text)}
    assert len(outcomes) == 1, outcomes
    return outcomes.pop()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=5)


@given(OBJECTS, st.booleans(), st.sampled_from([None, 0, 2]))
def test_json_is_passed_on_as_it_is(value: dict[str, object], ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert repair(text + ' "rest') == (text, ' "rest')


@given(st.dictionaries(st.from_regex(r"\A[a-z_]{1,5}\Z"), VALUES, max_size=4))
def test_pythons_arguments_become_an_object(arguments: dict[str, object]) -> None:
    written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    out, rest = repair(f"({written}) and more", parameters=())
    assert rest == " and more"
    assert json.loads(out) == arguments


PARTS = st.sampled_from(
    [
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        '"',
        "'",
        ":",
        ",",
        "=",
        "<",
        '<|"|>',
        "\\",
        "\\u00e",
        "\\x4",
        "true",
        "None",
        "-1.",
        "a",
        "\n",
        " ",
    ]
)


@given(st.lists(PARTS | st.text(max_size=2), max_size=14).map("".join), st.booleans())
def test_whatever_comes_what_leaves_is_json(text: str, is_call: bool) -> None:
    out, rest = repair(text, parameters=("a", "b") if is_call else None)
    json.loads(out)
    assert text.endswith(rest)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{'a': 'it\\'s \"so\"'}", '{"a": "it\'s \\"so\\""}'),
        ("{a: b, 1: c-d}", '{"a": "b", "1": "c-d"}'),
        ('{"a": [1, 2,], "b": {},}', '{"a": [1, 2], "b": {}}'),
        ('{"a": 1 "b": 2}', '{"a": 1, "b": 2}'),
        (
            '{"a": True, "b": None, "c": 01, "d": 1., "e": NaN}',
            '{"a": true, "b": null, "c": "01", "d": "1.", "e": "NaN"}',
        ),
        ('{"a": "x\ny\t\x01"}', '{"a": "x\\ny\\t\\u0001"}'),
        ('{"a": "\\d\\x41\\u12"}', '{"a": "\\\\d\\u0041\\\\u12"}'),
        ('{"a": "\\U0001f600\\U99999999"}', '{"a": "\\ud83d\\ude00\\\\U99999999"}'),
        ('{k:<|"|>a"\\b<|"|>}', '{"k":"a\\"\\\\b"}'),
        ('{"a": ', '{"a":null}'),
        ('{"a', '{"a":null}'),
        ('{"a": [{"b": "c', '{"a": [{"b": "c"}]}'),
        ("", "null"),
    ],
)
def test_what_is_mended(text: str, expected: str) -> None:
    assert repair(text) == (expected, "")
    json.loads(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('("Rome", 3)', ({"city": "Rome", "days": 3}, "")),
        ("([1], days={'a': 1})", ({"city": [1], "days": {"a": 1}}, "")),
        ("(days=3, city='x')", ({"days": 3, "city": "x"}, "")),
        ("(1, 2, 3)", ({"city": 1, "days": 2}, "3)")),
    ],
)
def test_arguments_without_names_get_those_of_the_schema(text: str, expected: object) -> None:
    out, rest = repair(text, parameters=("city", "days"))
    assert (json.loads(out), rest) == expected


def test_it_stops_where_it_can_not_go_on() -> None:
    assert repair('{"a": 1}}') == ('{"a": 1}', "}")
    assert repair('{"a": </tool_call>') == ('{"a":null}', "</tool_call>")
    assert repair('{"a": 1 = 2}') == ('{"a": 1}', "= 2}")
    out, rest = repair("[" * (MAX_DEPTH + 5))
    assert (json.loads(out), rest) == (json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH), "[" * 5)


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"const": 1.5}, {"number"}),
        ({"anyOf": [{"type": "integer"}, {"const": "auto"}]}, {"integer", "string"}),
        ({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/x"}]}, set()),
        ({}, set()),
        (None, set()),
    ],
)
def test_the_types_that_a_schema_names(schema: object, kinds: set[str]) -> None:
    assert kinds_of(schema) == kinds


@pytest.mark.parametrize(
    ("text", "kinds", "expected"),
    [
        ("3", {"integer"}, 3),
        ("3", {"string", "null"}, "3"),
        ("3", {"string", "integer"}, 3),
        ("null", {"string", "null"}, None),
        ('"3"', {"string", "integer"}, "3"),
        ("1.5", {"string", "integer"}, "1.5"),
        ("{'a': [True]}", {"object"}, {"a": [True]}),
        ("{'a': 1} and more", {"object"}, "{'a': 1} and more"),
        (" many words ", {"integer"}, " many words "),
        ("true", set(), True),
        ("", {"integer"}, ""),
    ],
)
def test_text_as_json_of_a_type(text: str, kinds: set[str], expected: object) -> None:
    assert json.loads(json_of(text, frozenset(kinds))) == expected
