"""docs/compatibility.md: what each endpoint does with each parameter, from the models and tables that decide it.

paddock config compatibility > docs/compatibility.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from gateway.api.parameters.base import synonyms_of
from gateway.api.parameters.unread import Refusal


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One body and the routes that take it."""

    routes: tuple[str, ...]
    """Each as `POST /path`; the first one names the endpoint in the table."""
    body: type[BaseModel]
    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, Refusal] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DialectTable:
    """One dialect's part of the page."""

    title: str
    about: str
    endpoints: tuple[Endpoint, ...]
    plain: Mapping[str, str] = field(default_factory=dict)
    """Routes without a table of parameters -> what they take."""


HEAD = """\
# Compatibility

What each endpoint does with each parameter: **yes** with what it takes, **ignored** with why it changes nothing,
**refused** with what to do instead. `null` counts as left out everywhere, and a refused parameter passes with a value
that asks for nothing. An answer names what was ignored in its header `x-paddock-ignored`. This page is made from the
models and tables that decide it, by `paddock config compatibility`; what the parameters mean stands in
[api.md](api.md).
"""


def page(tables: Sequence[DialectTable]) -> str:
    return "\n".join([HEAD, *(_section(table) for table in tables)])


def _section(table: DialectTable) -> str:
    lines = [f"## {table.title}", "", table.about, "", "| endpoint | parameter | | |", "|---|---|---|---|"]
    for endpoint in table.endpoints:
        lines += [f"| `{endpoint.routes[0]}` | {row} |" for row in _rows(endpoint)]
    lines.append("")
    for endpoint in table.endpoints:
        if len(endpoint.routes) > 1:
            others = ", ".join(f"`{route}`" for route in endpoint.routes[1:])
            lines += [f"The same as `{endpoint.routes[0]}`: {others}.", ""]
    lines += [f"- `{route}`: {takes}" for route, takes in table.plain.items()]
    if table.plain:
        lines.append("")
    return "\n".join(lines)


def _rows(endpoint: Endpoint) -> Iterator[str]:
    schema = endpoint.body.model_json_schema()
    named, defs = schema["properties"], schema.get("$defs", {})
    required, synonyms = schema.get("required", ()), synonyms_of(endpoint.body)
    for name in sorted(named):
        words = described(named[name], defs)
        if name in required:
            words += "; must be there"
        elif "default" in named[name] and named[name]["default"] not in (None, "", {}):
            words += f"; {_value(named[name]['default'])} unless given"
        if name in synonyms:
            words += "; also as " + ", ".join(f"`{other}`" for other in synonyms[name])
        yield f"`{name}` | yes | {_cell(words)}"
    for name, why in sorted(endpoint.ignored.items()):
        yield f"`{name}` | ignored | {_cell(why)}"
    for name, refusal in sorted(endpoint.refused.items(), key=lambda item: (not item[1].is_hint, item[0])):
        yield f"`{name}` | {'ignored' if refusal.is_hint else 'refused'} | {_cell(_remedy(refusal))}"
    yield f"any other | ignored | {_STRICT}"


_STRICT = "refused with `unknown_parameters: refuse`"


def _remedy(refusal: Refusal) -> str:
    passing = " or ".join(_value(value) for value in refusal.harmless)
    if refusal.is_hint:
        return f"{refusal.remedy} {_STRICT.capitalize()}{f', but as {passing}' if passing else ''}."
    return f"{refusal.remedy} Passes as {passing}." if passing else refusal.remedy


def described(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    """Return a value's JSON Schema in words."""
    if "description" in schema and "$ref" not in schema and schema.get("type") != "object":
        return str(schema["description"])
    if "$ref" in schema:
        return described(defs[schema["$ref"].rsplit("/", 1)[-1]], defs)
    for union in ("anyOf", "oneOf"):
        if union in schema:
            kinds = [described(kind, defs) for kind in schema[union] if kind.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "const" in schema:
        return _value(schema["const"])
    if "enum" in schema:
        return ", ".join(_value(value) for value in schema["enum"])
    return _of_type(schema, defs)


def _of_type(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    match schema.get("type"):
        case "boolean":
            return "true or false"
        case "integer" | "number" as kind:
            return " ".join([kind, *_bounds(schema, "minimum", "maximum", "")])
        case "string":
            pattern = [f"that matches `{schema['pattern']}`"] if "pattern" in schema else []
            return " ".join(["string", *_bounds(schema, "minLength", "maxLength", "characters"), *pattern])
        case "array":
            items = described(schema["items"], defs) if schema.get("items") else "anything"
            return " ".join(["array", *_bounds(schema, "minItems", "maxItems", "items"), f"of: {items}"])
        case "object":
            names = ", ".join(f"`{name}`" for name in sorted(schema.get("properties", {})))
            return f"object with {names}" if names else "object"
        case _:
            return "anything that the endpoint reads"


_HUGE = 2**31 - 1
"""Upper bounds from here on are not shown: they say only what fits a number."""


def _bounds(schema: Mapping[str, Any], least: str, most: str, unit: str) -> list[str]:
    low, high = schema.get(least), schema.get(most)
    high = None if high is not None and high >= _HUGE else high
    words = [unit] if unit else []
    if low is not None and high is not None:
        return [f"{low:g} to {high:g}", *words]
    if low is not None:
        return [f"from {low:g}", *words]
    return [f"up to {high:g}", *words] if high is not None else []


def _value(value: Any) -> str:
    words = {True: "true", False: "false", None: "null"}
    if value is None or isinstance(value, bool):
        return words[value]
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`".replace("'", '"')


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
