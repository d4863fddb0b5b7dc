"""Arguments that a model writes as plain text, as JSON of the type that the tool's schema asks for."""

from __future__ import annotations

import json
from typing import Any

from workers.chat.tools.json_text import JsonText
from workers.protocol.requests import Tool

_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def property_schema(tools: tuple[Tool, ...], name: str, key: str) -> Any:
    """The schema of one parameter; None where there is none."""
    return _properties(tools, name).get(key)


def parameter_names(tools: tuple[Tool, ...], name: str) -> list[str]:
    """In the schema's order."""
    return list(_properties(tools, name))


def _properties(tools: tuple[Tool, ...], name: str) -> dict[str, Any]:
    tool = next((tool for tool in tools if tool.name == name), None)
    properties = (tool.parameters or {}).get("properties") if tool is not None else None
    return properties if isinstance(properties, dict) else {}


def kinds_of(schema: Any) -> frozenset[str]:
    """JSON types that the schema names; empty: it names none."""
    if not isinstance(schema, dict):
        return frozenset()
    told = schema.get("type")
    if isinstance(told, str):
        return frozenset({told})
    if isinstance(told, list):
        return frozenset(map(str, told))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_KINDS.get(type(value), "other") for value in values)
    kinds: frozenset[str] = frozenset()
    for part in (*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))):
        found = kinds_of(part)
        if not found:
            return frozenset()
        kinds |= found
    return kinds


def json_of(text: str, kinds: frozenset[str]) -> str:
    """JSON text; what can't be read as one of `kinds` is a string."""
    value = JsonText()
    stripped = text.strip()
    mended, reached = value.feed(stripped, 0, ended=True)
    if not value.is_done or reached < len(stripped):
        return json.dumps(text, ensure_ascii=False)
    if "string" in kinds and stripped[:1] != '"' and not _fits(mended, kinds - {"string"}):
        return json.dumps(text, ensure_ascii=False)
    return mended


def _fits(mended: str, kinds: frozenset[str]) -> bool:
    first = mended[:1]
    if first in '{["':
        return {"{": "object", "[": "array", '"': "string"}[first] in kinds
    if first in "tfn":
        return ("null" if first == "n" else "boolean") in kinds
    return "number" in kinds or ("integer" in kinds and mended.lstrip("-").isdigit())


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
