"""Makes tools whose schemas are written as Python objects."""

from __future__ import annotations

from typing import Any

import msgspec

from workers.protocol.requests import Tool


def tool_of(
    name: str, description: str | None = None, schema: dict[str, Any] | None = None, *, strict: bool = False
) -> Tool:
    """Return a tool; `schema` None: it has none."""
    return Tool(name, description, None if schema is None else json_of(schema), strict=strict)


def json_of(value: object) -> str:
    """Return a value as the gateway writes it into a request: schemas, and values for templates."""
    return msgspec.json.encode(value).decode()
