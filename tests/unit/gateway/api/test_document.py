"""`/openapi.json` describes what the gateway serves: its routes, and the bodies by the types that read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from accounts.protocol.api_page import page_of
from gateway.api.compatibility import TABLES, Endpoint
from gateway.api.http.sockets import METHOD
from gateway.api.operations.document import ABOUT, openapi
from gateway.api.routes import ROUTES

DOCUMENT = openapi()
ENDPOINTS = [endpoint for table in TABLES for endpoint in table.endpoints]


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        for name, value in part.items():
            if name == "$ref":
                yield value
            yield from references(value)
    elif isinstance(part, list):
        for value in part:
            yield from references(value)


def operation(route: str) -> dict[str, Any]:
    method, path = route.split(" ")
    found: dict[str, Any] = DOCUMENT["paths"][path][method.lower()]
    return found


def schema_of(endpoint: Endpoint) -> dict[str, Any]:
    """The schema of a body, with all that it refers to."""
    [content] = operation(endpoint.routes[0])["requestBody"]["content"].values()
    return {**content["schema"], "components": DOCUMENT["components"]}


def test_every_route_is_there_but_those_with_a_document_of_their_own() -> None:
    told = {f"{method.upper()} {path}" for path, methods in DOCUMENT["paths"].items() for method in methods}
    served = {f"{row.method} {row.shown_path}" for row in ROUTES if row.name != "accounts" and row.method != METHOD}
    assert told == served
    names = [one["operationId"] for methods in DOCUMENT["paths"].values() for one in methods.values()]
    assert len(names) == len(set(names))


def test_references_lead_somewhere_and_schemas_are_valid() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert {reference.rpartition("/")[2] for reference in references(DOCUMENT)} <= schemas.keys()
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)


def test_what_needs_no_key_says_so() -> None:
    assert operation("GET /health")["security"] == []
    assert "security" not in operation("POST /v1/chat/completions")


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.routes[0])
def test_the_schema_has_the_fields_that_are_read(endpoint: Endpoint) -> None:
    [content] = operation(endpoint.routes[0])["requestBody"]["content"].values()
    schema = DOCUMENT["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    assert schema["properties"].keys() == {
        field.alias or field.validation_alias or name if isinstance(field.validation_alias, str | None) else name
        for name, field in endpoint.body.model_fields.items()
    }


@pytest.mark.parametrize(
    ("route", "body", "is_good"),
    [
        ("POST /v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, True),
        ("POST /v1/chat/completions", {"messages": []}, False),
        ("POST /v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "temperature": "hot"}, False),
        ("POST /tokenize", {"content": "hi"}, True),
        ("POST /v1/rerank", {"query": "a", "documents": ["b"]}, True),
        ("POST /v1/rerank", {"documents": ["b"]}, False),
    ],
)
def test_schema_and_reader_agree(route: str, body: dict[str, Any], is_good: bool) -> None:
    endpoint = next(endpoint for endpoint in ENDPOINTS if route in endpoint.routes)
    assert Draft202012Validator(schema_of(endpoint)).is_valid(body) is is_good
    try:
        endpoint.body.model_validate_json(json.dumps(body))
        is_read = True
    except ValidationError:
        is_read = False
    assert is_read is is_good


def test_the_page_names_every_route() -> None:
    page = page_of(DOCUMENT, ABOUT, "/openapi.json")
    assert all(f"<code>{path}</code>" in page for path in DOCUMENT["paths"])
