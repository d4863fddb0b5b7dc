"""The page of parameters is what the models and tables say, and leaves no route out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.api.compatibility import TABLES, Endpoint, compatibility_page, describe
from gateway.api.routes import ROUTES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
ENDPOINTS = [endpoint for table in TABLES for endpoint in table.endpoints]


def rows(endpoint: Endpoint) -> dict[str, list[str]]:
    """Parameter -> the cells behind it."""
    row = rf"^\| `{re.escape(endpoint.routes[0])}` \| `([\w.]+)` \| (.*) \|$"
    found = re.findall(row, PAGE.read_text(), re.MULTILINE)
    return {name: re.split(r" (?<!\\)\| ", rest) for name, rest in found}


def test_the_page_is_what_the_models_say() -> None:
    assert PAGE.read_text() == compatibility_page(), "run: paddock config compatibility > docs/compatibility.md"


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.routes[0])
def test_every_parameter_is_told_once_with_a_reason(endpoint: Endpoint) -> None:
    told = rows(endpoint)
    names = [field.alias or name for name, field in endpoint.body.model_fields.items()]
    assert set(told) == {*names, *endpoint.ignored, *endpoint.refused}
    assert len(told) == len(names) + len(endpoint.ignored) + len(endpoint.refused), "each has one fate"
    assert all(len(cells) == 2 and len(cells[1]) > 3 for cells in told.values())


def test_every_route_that_takes_a_body_is_there() -> None:
    told = {route for endpoint in ENDPOINTS for route in endpoint.routes} | {
        route for table in TABLES for route in table.plain
    }
    # Bodies of the accounts service are told by its own page, `/admin/openapi.json`.
    assert told == {
        f"{row.method} {row.shown_path}" for row in ROUTES if row.method == "POST" and row.name != "accounts"
    }


def test_values_in_words() -> None:
    defs = {"Named": {"type": "object", "properties": {"b": {}, "a": {}}}}
    assert describe({"type": "integer", "minimum": -1, "maximum": 2**31 - 1}, defs) == "integer from -1"
    assert describe({"type": "number", "minimum": 0, "maximum": 0.99}, defs) == "number 0 to 0.99"
    assert describe({"enum": ["x", "y"]}, defs) == '`"x"`, `"y"`'
    assert describe({"anyOf": [{"$ref": "#/$defs/Named"}, {"type": "null"}]}, defs) == "object with `a`, `b`"
    many = {"type": "array", "maxItems": 3, "items": {"type": "string", "minLength": 1, "maxLength": 9}}
    assert describe(many, defs) == "array up to 3 items of: string 1 to 9 characters"
