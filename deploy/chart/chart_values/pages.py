"""The schema and the table, as text."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import yaml

from chart_values.kinds import Schema
from chart_values.told import defaults, descriptions
from chart_values.values import whole_schema

MAY_GO = ("resources", "settings")
"""Mappings whose entries `null` may take away: then there is no such limit, or the program's own default holds."""
BEGIN, END = "<!-- values: written by deploy/chart/write_values.py -->", "<!-- end of values -->"


def schema_text(values: str) -> str:
    """`values`: the text of values.yaml."""
    schema = whole_schema()
    for path, said in descriptions(values).items():
        _describe(schema, path.split("."), said)
    entry = schema["properties"]["models"]["items"]["properties"]
    for name, said in schema["properties"]["workers"]["properties"].items():
        entry[name] = copy.deepcopy(said)
    for name, given in yaml.safe_load(values).items():
        _require(schema["properties"][name], given)
    return json.dumps(schema, indent=2) + "\n"


def _require(schema: Schema, given: Any) -> None:
    """Require each scalar with a default within a mapping: `null` takes it away, and templates can't be without."""
    if not isinstance(given, Mapping) or "properties" not in schema:
        return
    needed = [name for name, value in given.items() if isinstance(value, str | int | float) and value != ""]
    if needed:
        schema["required"] = [*schema.get("required", ()), *needed]
    for name, value in given.items():
        if name not in MAY_GO:
            _require(schema["properties"][name], value)


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
