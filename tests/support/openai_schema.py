"""OpenAI's own specification as a judge of what is answered; tests that ask it are skipped where it is not at hand."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import pytest

from tests.conftest import SHARED

SPEC = SHARED / "specs" / "openai_openapi.json"


def check(schema: str, document: Any) -> None:
    """Raises jsonschema.ValidationError where the document is not what the specification says."""
    _validator(schema).validate(document)


def properties(schema: str) -> set[str]:
    """Names of a request's parameters, those of the schemas that it is made of included."""
    schemas = specification()["components"]["schemas"]
    found: set[str] = set()
    for part in [schemas[schema], *schemas[schema].get("allOf", [])]:
        found |= set(part.get("properties", {}))
        if "$ref" in part:
            found |= properties(part["$ref"].rsplit("/", 1)[-1])
    return found


@cache
def specification() -> dict[str, Any]:
    if not SPEC.is_file():
        pytest.skip("shared/specs is not there")
    document: dict[str, Any] = json.loads(SPEC.read_text())
    return document


@cache
def _validator(schema: str) -> jsonschema.Draft202012Validator:
    wanted = {"$ref": f"#/components/schemas/{schema}", "components": specification()["components"]}
    return jsonschema.Draft202012Validator(_nullable(wanted))


def _nullable(schema: Any) -> Any:
    """OpenAPI 3.0's `nullable`, which the file still uses in places, in JSON Schema's words."""
    if isinstance(schema, list):
        return [_nullable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: _nullable(value) for name, value in schema.items()}
    return {"anyOf": [inner, {"type": "null"}]} if inner.pop("nullable", False) is True else inner
