"""A tool's parameters one by one, for model families that write each as plain text between its own marks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from workers.chat.tools.typed_text import kinds_of
from workers.constraint.failures import Unusable
from workers.constraint.schema import ANNOTATIONS, enforceable
from workers.protocol.requests import Tool

PLAIN_OBJECT = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"})
"""Keywords of a tool's schema that can be enforced for parameters one by one."""
PLAIN_TEXT = frozenset({"type", "enum", "const"})
"""Keywords that can be enforced for a parameter that is text."""


MAX_READ_BYTES = 1 << 20
"""Most bytes of definitions times parameters: each parameter reads them all, and 1,000 by 10,000s take minutes."""


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    required: bool
    is_text: bool
    """Whether the value is written as it is, and not as JSON."""
    values: tuple[str, ...]
    """Allowed values; empty: any text."""
    schema: Any
    """Schema of the value, where it is JSON."""


def parameters_of(tool: Tool, *, closes: bool = False) -> Iterator[Parameter]:
    """Yield parameters in the schema's order. Raises Unusable, for strict tools only. `closes`: see `enforceable`."""
    root = tool.parameters or {}
    properties, required = root.get("properties"), root.get("required")
    if tool.strict:
        _check(root, PLAIN_OBJECT)
    definitions: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if key in root}
    named: dict[str, Any] = properties if isinstance(properties, dict) else {}
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    too_much = bool(definitions) and len(msgspec.json.encode(definitions)) * len(named) > MAX_READ_BYTES
    if too_much and tool.strict:
        size = f"{MAX_READ_BYTES >> 10} KiB"
        raise Unusable(f"the schema's definitions, times its parameters, are more than {size}; send smaller ones")
    for name, schema in named.items():
        if too_much and kinds_of(schema) != {"string"}:
            yield Parameter(name, name in needed, False, (), True)
        else:
            yield _parameter(name, schema, definitions, tool, name in needed, closes)


def _parameter(
    name: str, schema: Any, definitions: dict[str, Any], tool: Tool, required: bool, closes: bool
) -> Parameter:
    if kinds_of(schema) == {"string"}:
        values = [schema["const"]] if "const" in schema else schema.get("enum", ())
        if tool.strict:
            _check(schema, PLAIN_TEXT)
        told = tuple(value for value in values if isinstance(value, str)) if isinstance(values, list | tuple) else ()
        return Parameter(name, required, True, told, None)
    try:
        whole = {**schema, **definitions} if isinstance(schema, dict) else schema
        return Parameter(name, required, False, (), enforceable(whole, closes=closes))
    except Unusable:
        if tool.strict:
            raise
        return Parameter(name, required, False, (), True)


def _check(schema: dict[str, Any], kept: frozenset[str]) -> None:
    """Raise Unusable for keywords that can't be enforced in a text that is not JSON."""
    for key in schema:
        if key not in kept and key not in ANNOTATIONS:
            raise Unusable(f"the keyword `{key}` can't be enforced in this model's form of calls; leave it out")
