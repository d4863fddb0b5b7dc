"""Describes the API by an OpenAPI 3.1 document, made from the routes and their structs."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
from starlette.responses import Response

from accounts.access.records import KINDS
from accounts.api.api import EVERYBODY, JSON, AdminRequest, RouteRow, encode
from accounts.protocol.api_page import page_of
from accounts.protocol.records import Budget, Limits, TeamLimits

TITLE = "Paddock's admin API"
ABOUT = (
    "Send your key as <code>Authorization: Bearer</code>. Bodies and answers are JSON; a change takes the fields to "
    "change (RFC 7396: null sets the default). <code>version</code> makes sure that nobody changed it meanwhile."
)
REF = "#/components/schemas/{name}"
_VARIABLE = re.compile(r"{(\w+)(?::path)?}")
VERSION = "1"
"""Version of the API, which grows when clients have to be changed."""
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


class Document:
    """The document of the routes, and the routes that show it. It is made for the first who asks for it: that takes
    0.3 s, which every start of the service would take longer."""

    def __init__(self, rows: Sequence[RouteRow]) -> None:
        self._rows = rows

    def rows(self) -> tuple[RouteRow, ...]:
        return self._own_rows()

    @cached_property
    def _document(self) -> bytes:
        return encode(self._described)

    @cached_property
    def _page(self) -> bytes:
        return page_of(self._described, ABOUT, "openapi.json").encode()

    @cached_property
    def _described(self) -> dict[str, Any]:
        return openapi((*self._rows, *self._own_rows()))

    def show(self, request: AdminRequest) -> Response:
        return Response(self._document, media_type=JSON)

    def show_page(self, request: AdminRequest) -> Response:
        policy = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return Response(self._page, media_type="text/html; charset=utf-8", headers=policy)

    def _own_rows(self) -> tuple[RouteRow, ...]:
        return (
            RouteRow("GET", "/admin/openapi.json", EVERYBODY, self.show, "this document"),
            RouteRow("GET", "/admin/docs", EVERYBODY, self.show_page, "a page of it"),
        )


def openapi(rows: Sequence[RouteRow]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the routes."""
    structs = list(dict.fromkeys(of for row in rows for of in (row.body, row.answers, row.query) if of is not None))
    schemas, components = msgspec.json.schema_components(structs, ref_template=REF)
    schema_of = dict(zip(structs, schemas, strict=True))
    for name, schema in components.items():
        _describe(schema, descriptions(name))
    paths: dict[str, dict[str, Any]] = {}
    for row in rows:
        path = _VARIABLE.sub(r"{\1}", row.path)
        paths.setdefault(path, {})[row.method.lower()] = _operation(row, schema_of, components)
    queries = {row.query.__name__ for row in rows if row.query is not None}
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": VERSION},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {**{name: of for name, of in components.items() if name not in queries}, "Error": _ERROR},
        },
    }


def _operation(row: RouteRow, schema_of: Mapping[type, Any], components: Mapping[str, Any]) -> dict[str, Any]:
    answered: dict[str, Any] = {"description": "done"}
    if row.answers is not None:
        answered["content"] = {"application/json": {"schema": schema_of[row.answers]}}
    refused = {
        "description": "an error",
        "content": {"application/json": {"schema": {"$ref": REF.format(name="Error")}}},
    }
    name = re.sub(r"\W+", "_", f"{row.method.lower()}_{_VARIABLE.sub(r'one', row.path).strip('/')}")
    told: dict[str, Any] = {
        "operationId": name,
        "summary": row.about[:1].upper() + row.about[1:],
        "tags": [row.path.split("/")[2] if row.path.startswith("/admin/") else row.path.split("/")[1]],
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _VARIABLE.findall(row.path)
        ],
        "responses": {str(row.status): answered, "default": refused},
        "x-roles": sorted(row.roles),
    }
    if row.query is not None:
        schema = components[row.query.__name__]
        required = schema.get("required", ())
        told["parameters"] += [
            {
                "name": name,
                "in": "query",
                "required": name in required,
                "schema": of,
                "description": of.get("description", ""),
            }
            for name, of in schema["properties"].items()
        ]
    if row.body is not None:
        told["requestBody"] = {"content": {"application/json": {"schema": schema_of[row.body]}}}
    if not row.roles:
        told["security"] = []
    return told


def _describe(schema: dict[str, Any], told: Mapping[str, str]) -> None:
    for name, of in schema.get("properties", {}).items():
        if name in told and "$ref" not in of:
            of.setdefault("description", told[name])


def descriptions(schema: str) -> dict[str, str]:
    """Return the descriptions of a schema's fields: those of the record that it shows, or of the struct itself."""
    found: dict[str, str] = {}
    for kind in KINDS.values():
        if schema.startswith(kind.name.title()):
            found |= _documented(kind.record)
    for name, structs in (("Limits", (Limits,)), ("TeamLimits", (Limits, TeamLimits)), ("Budget", (Budget,))):
        if schema == name:
            for struct in structs:
                found |= _documented(struct)
    return found


def _documented(struct: type[Any]) -> Mapping[str, str]:
    """Return the texts that stand below the fields of a struct in its source."""
    tree = ast.parse(inspect.getsource(struct)).body[0]
    told: dict[str, str] = {}
    if isinstance(tree, ast.ClassDef):
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                told[field.target.id] = " ".join(str(text.value.value).split())  # type: ignore[attr-defined]
    return told
