"""The schema and the table, as text."""

from __future__ import annotations

import json
from typing import Any

from chart_values.kinds import Schema
from chart_values.told import defaults, descriptions
from chart_values.values import whole_schema

BEGIN, END = "<!-- values: written by deploy/chart/write_values.py -->", "<!-- end of values -->"


def schema_text(values: str) -> str:
    """`values`: the text of values.yaml."""
    schema = whole_schema()
    for path, said in descriptions(values).items():
        _describe(schema, path.split("."), said)
    entry = schema["properties"]["models"]["items"]["properties"]
    for name, said in schema["properties"]["workers"]["properties"].items():
        entry[name] = said
    return json.dumps(schema, indent=2) + "\n"


def _describe(schema: Schema, path: list[str], said: str) -> None:
    """Raises KeyError: values.yaml has a value that the schema does not know."""
    found: Any = schema
    for name in path:
        found = found["properties"][name]
    found["description"] = said


def table(values: str) -> str:
    told = descriptions(values)
    rows = ["| value | default | |", "|---|---|---|"]
    for path, default in defaults(values):
        rows.append(f"| `{path}` | {_shown(default)} | {told.get(path, '').replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def _shown(value: object) -> str:
    return "" if value in ("", [], {}) else f"`{json.dumps(value) if not isinstance(value, str) else value}`"


def readme(page: str, values: str) -> str:
    """The page with its table renewed."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table(values)}\n{END}{rest.split(END)[1]}"
