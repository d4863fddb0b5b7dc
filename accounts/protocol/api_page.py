"""Shows an OpenAPI document as a page for people, which needs no other file."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

STYLE = """
:root{color-scheme:light dark;font:15px/1.5 system-ui,sans-serif}
body{max-width:62rem;margin:2rem auto;padding:0 1rem}
code{font-family:ui-monospace,monospace;font-size:.92em}details{border:1px solid #8884;border-radius:6px;margin:.5rem 0}
summary{padding:.5rem .8rem;cursor:pointer}
summary b{display:inline-block;min-width:4.5rem}details>div{padding:0 .8rem .8rem}
table{border-collapse:collapse;width:100%}td,th{border-top:1px solid #8884;padding:.25rem .5rem;text-align:left;
vertical-align:top}h2{margin-top:2rem}small{opacity:.7}
"""


def page_of(document: Mapping[str, Any], about: str, address: str) -> str:
    """Return an OpenAPI document as a page. `about`: HTML that says what holds for all routes; `address`: where the
    document is."""
    groups: dict[str, list[str]] = {}
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, told in methods.items():
            groups.setdefault(told["tags"][0], []).append(_section(path, method, told, schemas))
    sections = "".join(f"<h2>{html.escape(group)}</h2>{''.join(rows)}" for group, rows in groups.items())
    title = html.escape(document["info"]["title"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f'<h1>{title}</h1><p>{about} As <a href="{address}">OpenAPI</a>.</p>{sections}</html>'
    )


def _section(path: str, method: str, told: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    roles = ", ".join(told["x-roles"]) or "everybody"
    parts = [f"<p>For: {html.escape(roles)}</p>"]
    if told["parameters"]:
        rows = [(one["name"], one["in"], one.get("description", "")) for one in told["parameters"]]
        parts.append(_table(("parameter", "in", ""), rows))
    if body := told.get("requestBody"):
        [content] = body["content"].values()
        parts.append("<h4>Body</h4>" + _fields(content["schema"], schemas))
    for status, answered in told["responses"].items():
        if status != "default" and "content" in answered:
            parts.append("<h4>Answer</h4>" + _fields(answered["content"]["application/json"]["schema"], schemas))
    head = f"<b>{method.upper()}</b> <code>{html.escape(path)}</code> <small>{html.escape(told['summary'])}</small>"
    return f"<details><summary>{head}</summary><div>{''.join(parts)}</div></details>"


def _fields(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    found = schemas.get(schema.get("$ref", "").rpartition("/")[2], schema)
    rows = [(name, _type_of(of), of.get("description", "")) for name, of in found.get("properties", {}).items()]
    return _table(("field", "type", ""), rows)


def _type_of(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(_type_of(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    if schema.get("type") == "array":
        return f"list of {_type_of(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heads = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{heads}</tr>{lines}</table>"
