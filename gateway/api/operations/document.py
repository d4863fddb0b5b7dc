"""Answers `GET /openapi.json` with an OpenAPI 3.1 document of all routes, and `GET /docs` with a page of it.

Both are made from the table of routes and from the types that read the bodies, when somebody first asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.types import Receive, Scope, Send

from accounts.protocol.api_page import page_of
from gateway import __version__
from gateway.access.control import OPEN
from gateway.api.compatibility import TABLES, Endpoint
from gateway.api.dialect import Handler
from gateway.api.http.answers import JSON, send_bytes
from gateway.api.http.diagnostics import answer_headers, request_log_of
from gateway.api.http.sockets import METHOD
from gateway.api.routes import ROUTES, RouteRow
from gateway.call import Principal
from gateway.telemetry.metrics import OK

TITLE = "Paddock"
ABOUT = (
    "Send your key as <code>Authorization: Bearer</code>. Fields of other APIs that change nothing are left out here; "
    'docs/compatibility.md lists them. The admin API has <a href="/admin/docs">a page of its own</a>.'
)
ADDRESS = "/openapi.json"
REF = "#/components/schemas/{model}"
FORM = "multipart/form-data"
_VARIABLE = re.compile(r"{(\w+)(?::path)?}")
_FORWARDED = "accounts"
"""Name of the routes that the accounts service answers, which has a document of its own."""
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}


def openapi() -> dict[str, Any]:
    """Return the document."""
    bodies = _bodies()
    models = list(dict.fromkeys(endpoint.body for endpoint in bodies.values()))
    references, found = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    schema_of = {model: references[model, "validation"] for model in models}
    paths: dict[str, dict[str, Any]] = {}
    for row in _rows():
        path = _VARIABLE.sub(r"{\1}", row.path)
        paths.setdefault(path, {})[row.method.lower()] = _operation(row, bodies, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": __version__},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {**found.get("$defs", {}), "Error": _ERROR},
        },
    }


def _rows() -> Iterator[RouteRow]:
    """Yield the routes to describe: each path once, without those that have a document of their own."""
    for row in ROUTES:
        if row.name != _FORWARDED and row.method != METHOD:
            yield row


def _bodies() -> dict[str, Endpoint]:
    """Return `POST /path` -> what its body is."""
    return {route: endpoint for table in TABLES for endpoint in table.endpoints for route in endpoint.routes}


def _operation(
    row: RouteRow, bodies: Mapping[str, Endpoint], schema_of: Mapping[type[BaseModel], Any]
) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": REF.format(model="Error")}}}
    told: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", row.method.lower() + row.shown_path),
        "summary": row.about[:1].upper() + row.about[1:],
        "tags": [_tag(row)],
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _VARIABLE.findall(row.path)
        ],
        "responses": {"200": {"description": "done"}, "default": {"description": "an error", "content": error}},
    }
    if (endpoint := bodies.get(f"{row.method} {row.path}")) is not None:
        kind = FORM if row.path.endswith(("/audio/transcriptions", "/audio/translations")) else "application/json"
        told["requestBody"] = {"content": {kind: {"schema": schema_of[endpoint.body]}}, "required": True}
    if row.access is OPEN:
        told["security"] = []
    told["x-roles"] = [] if row.access is OPEN else ["admin"] if row.access.name == "ADMIN" else ["any key"]
    return told


def _tag(row: RouteRow) -> str:
    """Return the chapter of a route: that of the path that it is an alias of."""
    parts = (row.alias_of or row.path).strip("/").split("/")
    return parts[1] if parts[0] == "v1" and len(parts) > 1 else parts[0] or "ui"


@cache
def _encoded() -> tuple[bytes, bytes]:
    """Return the document as JSON and as a page."""
    document = openapi()
    return msgspec.json.encode(document), page_of(document, ABOUT, ADDRESS).encode()


async def show_document(principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the document."""
    await send_bytes(send, _encoded()[0], JSON, request_log_of(scope))


async def show_page(principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the page, which may load nothing and run no script."""
    request_log, page = request_log_of(scope), _encoded()[1]
    request_log.status, request_log.outcome = 200, OK
    headers = [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-length", b"%d" % len(page)),
        (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
        *answer_headers(request_log),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": page})


def document_handlers() -> Mapping[str, Handler]:
    """Return name -> handler of both routes."""
    return {"document": show_document, "document_page": show_page}
